"""The simulation of many replicas: what must hold of its integers whatever the policy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvant.bench.scale import (
    COMMON_TOKENS,
    MAX_PROMPT_TOKENS,
    POLICIES,
    ChatTrace,
    ReplicaHardware,
    make_trace,
    simulate_policy,
)

MACHINE = ReplicaHardware(
    reads=1000, writes=100, bytes_a_token=10, max_bytes=10**9, store_bytes=10**6
)


def row(
    name: str, asked: ChatTrace, replicas: int = 4, machine: ReplicaHardware = MACHINE
) -> dict[str, Any]:
    return simulate_policy(name, asked, replicas, machine, 0)


def test_a_trace_has_the_shape_that_it_was_told() -> None:
    made = make_trace(20_000, 10.0, 0)
    assert len(made.times) == 20_000 and all(one <= other for one, other in pairwise(made.times))
    assert 0.8 * 2000 < made.times[-1] / 1e6 < 1.3 * 2000
    assert min(made.prompts) > COMMON_TOKENS and max(made.prompts) <= MAX_PROMPT_TOKENS
    turns = 20_000 / len(set(made.chats))
    assert 1.4 < turns < 1.7
    last: dict[int, int] = {}
    for chat, prompt in zip(made.chats, made.prompts, strict=True):
        assert prompt >= last.get(chat, 0)
        last[chat] = prompt
    assert make_trace(500, 10.0, 7) == make_trace(500, 10.0, 7) != make_trace(500, 10.0, 8)


@pytest.mark.parametrize("name", POLICIES)
def test_every_token_is_kept_restored_or_computed(name: str) -> None:
    told = row(name, make_trace(2000, 4.0, 0))
    parts = [told[f"{kind}_percent"] for kind in ("kept", "restored", "computed")]
    assert sum(parts) == pytest.approx(100) and min(parts) > 0
    assert told["busiest"] >= 1


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_read_beside_a_store_does_not_depend_on_the_way(name: str) -> None:
    """A wrong way costs a restore and no reading, once replicas have what all begin with."""
    asked = make_trace(2000, 4.0, 0)
    assert row(name, asked)["computed_percent"] == pytest.approx(
        row("pages", asked)["computed_percent"], abs=0.1
    )


def test_pages_are_found_where_they_are() -> None:
    asked, alone = make_trace(2000, 4.0, 0), ReplicaHardware(1000, 100, 10, 10**9, 0)
    found = {name: row(name, asked, machine=alone) for name in POLICIES}
    one = row("random", asked, replicas=1, machine=alone)
    assert found["pages"]["kept_percent"] > 0.9 * one["kept_percent"]
    assert found["pages"]["kept_percent"] > 2 * found["random"]["kept_percent"]
    assert all(told["store_gb_s"] == 0 for told in found.values())


def test_one_after_another_by_hand() -> None:
    """Two requests of one chat to one replica: the second waits, and reads what is new."""
    asked = ChatTrace([0, 1_000_000], [0, 0], [2048, 2176], [64, 64])
    machine = ReplicaHardware(
        reads=1024, writes=64, bytes_a_token=1, max_bytes=10**6, store_bytes=0
    )
    told = row("round robin", asked, replicas=1, machine=machine)
    # 2 s and 1 s of the first; then 2176 - 2112 tokens: from 3 s on, so 2.0625 s after it came.
    assert told["kept_percent"] == pytest.approx(100 * 2112 / 4224)
    assert told["first_s"] == pytest.approx((2 + 2.0625) / 2)


def test_what_does_not_fit_goes() -> None:
    asked = ChatTrace([0, 10**9, 2 * 10**9], [0, 1, 0], [2048] * 3, [64] * 3)
    small = ReplicaHardware(reads=1024, writes=64, bytes_a_token=1, max_bytes=2200, store_bytes=0)
    assert row("random", asked, 1, small)["kept_percent"] == pytest.approx(100 * 2 * 512 / 6144)
    assert row("random", asked, 1, MACHINE)["kept_percent"] > 40
