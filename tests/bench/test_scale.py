"""Test invariants of the replica simulation that hold for every routing policy."""

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


def simulate(
    name: str, trace: ChatTrace, replicas: int = 4, machine: ReplicaHardware = MACHINE
) -> dict[str, Any]:
    return simulate_policy(name, trace, replicas, machine, 0)


def test_trace_has_the_requested_shape() -> None:
    trace = make_trace(20_000, 10.0, 0)
    assert len(trace.times) == 20_000 and all(
        earlier <= other for earlier, other in pairwise(trace.times)
    )
    assert 0.8 * 2000 < trace.times[-1] / 1e6 < 1.3 * 2000
    assert min(trace.prompts) > COMMON_TOKENS and max(trace.prompts) <= MAX_PROMPT_TOKENS
    turns = 20_000 / len(set(trace.chats))
    assert 1.4 < turns < 1.7
    last: dict[int, int] = {}
    for chat, prompt in zip(trace.chats, trace.prompts, strict=True):
        assert prompt >= last.get(chat, 0)
        last[chat] = prompt
    assert make_trace(500, 10.0, 7) == make_trace(500, 10.0, 7) != make_trace(500, 10.0, 8)


@pytest.mark.parametrize("name", POLICIES)
def test_every_token_is_cached_restored_or_computed(name: str) -> None:
    figures = simulate(name, make_trace(2000, 4.0, 0))
    parts = [figures[f"{source}_percent"] for source in ("kept", "restored", "computed")]
    assert sum(parts) == pytest.approx(100) and min(parts) > 0
    assert figures["busiest"] >= 1


@pytest.mark.parametrize("name", POLICIES)
def test_store_reads_do_not_depend_on_the_routing(name: str) -> None:
    """A wrong route costs a restore and no prefill, once replicas have the common prefix."""
    trace = make_trace(2000, 4.0, 0)
    assert simulate(name, trace)["computed_percent"] == pytest.approx(
        simulate("pages", trace)["computed_percent"], abs=0.1
    )


def test_pages_are_found_on_the_replica_that_has_them() -> None:
    trace, single_ = make_trace(2000, 4.0, 0), ReplicaHardware(1000, 100, 10, 10**9, 0)
    by_policy = {name: simulate(name, trace, machine=single_) for name in POLICIES}
    single = simulate("random", trace, replicas=1, machine=single_)
    assert by_policy["pages"]["kept_percent"] > 0.9 * single["kept_percent"]
    assert by_policy["pages"]["kept_percent"] > 2 * by_policy["random"]["kept_percent"]
    assert all(figures["store_gb_s"] == 0 for figures in by_policy.values())


def test_sequential_requests_match_a_manual_count() -> None:
    """Two requests of one chat to one replica: the second waits, then prefills the new tokens."""
    trace = ChatTrace([0, 1_000_000], [0, 0], [2048, 2176], [64, 64])
    machine = ReplicaHardware(
        reads=1024, writes=64, bytes_a_token=1, max_bytes=10**6, store_bytes=0
    )
    figures = simulate("round robin", trace, replicas=1, machine=machine)
    # 2 s and 1 s of the first; then 2176 - 2112 tokens: from 3 s on, so 2.0625 s after its arrival.
    assert figures["kept_percent"] == pytest.approx(100 * 2112 / 4224)
    assert figures["first_s"] == pytest.approx((2 + 2.0625) / 2)


def test_pages_beyond_the_limit_are_evicted() -> None:
    trace = ChatTrace([0, 10**9, 2 * 10**9], [0, 1, 0], [2048] * 3, [64] * 3)
    small = ReplicaHardware(reads=1024, writes=64, bytes_a_token=1, max_bytes=2200, store_bytes=0)
    assert simulate("random", trace, 1, small)["kept_percent"] == pytest.approx(
        100 * 2 * 512 / 6144
    )
    assert simulate("random", trace, 1, MACHINE)["kept_percent"] > 40
