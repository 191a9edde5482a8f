"""Test that files and stores of an earlier version are read and continued exactly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import kvant
from generation.speakers import Numbers
from golden.artifacts import (
    CACHES,
    DIM,
    FOLDER,
    HEADS,
    ROWS,
    STORES,
    append,
    generate_reply,
    make_exact_values,
    make_session,
    model_of,
)
from kvant import Cache, Session


def continue_attention(name: str, cache: Cache) -> list[torch.Tensor]:
    """Return the attention of every layer, after 70 more rows."""
    queries = make_exact_values((1, 2 * HEADS, 70, DIM), "queries")
    if name == "hybrid":
        layers = [cache[0], cache[1]["rows"]]
        cache[1]["memory"].append(70, {"conv": make_exact_values((1, 4, 2), "more")})
    else:
        layers = list(cache)
    return [kvant.attend(queries, append(layer, ROWS, ROWS + 70, "rows")) for layer in layers]


@pytest.mark.parametrize("name", CACHES)
def test_golden_cache_is_rewritten_byte_for_byte(name: str, tmp_path: Path) -> None:
    golden = FOLDER / f"{name}.kv"
    kvant.save(kvant.load(golden), tmp_path / "again.kv")
    assert (tmp_path / "again.kv").read_bytes() == golden.read_bytes()


@pytest.mark.parametrize("name", CACHES)
def test_golden_cache_continues_like_a_new_one(name: str) -> None:
    golden, today = kvant.load(FOLDER / f"{name}.kv"), CACHES[name]()
    assert golden.spec == today.spec and golden.length == today.length == ROWS
    for first, second in zip(
        continue_attention(name, golden), continue_attention(name, today), strict=True
    ):
        torch.testing.assert_close(first, second)


def test_a_golden_session_continues_its_conversation() -> None:
    golden = Session.load(FOLDER / "session.kv", model_of("llama"), Numbers())
    today = make_session()
    replies = [
        [step.token for step in each.send("8 9", max_new_tokens=8)] for each in (golden, today)
    ]
    assert replies[0] == replies[1]


@pytest.mark.parametrize("name", STORES)
def test_a_golden_store_restores_its_prefix(name: str, tmp_path: Path) -> None:
    family, spec = STORES[name]
    store = shutil.copytree(FOLDER / "stores" / name, tmp_path / "store")
    restored, single = generate_reply(family, spec, store), generate_reply(family, spec, None)
    assert restored.usage.restored_tokens >= 256
    assert restored.tokens == single.tokens
