"""Files and stores that the code of an earlier commit wrote are read, and continued exactly."""

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
    exact,
    model_of,
    reply,
    session,
)
from kvant import Cache, Session


def continued(name: str, cache: Cache) -> list[torch.Tensor]:
    """Attention of every layer of rows, with 70 rows more."""
    queries = exact((1, 2 * HEADS, 70, DIM), "queries")
    if name == "hybrid":
        layers = [cache[0], cache[1]["rows"]]
        cache[1]["memory"].append(70, {"conv": exact((1, 4, 2), "more")})
    else:
        layers = list(cache)
    return [kvant.attend(queries, append(layer, ROWS, ROWS + 70, "rows")) for layer in layers]


@pytest.mark.parametrize("name", CACHES)
def test_a_golden_cache_is_written_again_byte_by_byte(name: str, tmp_path: Path) -> None:
    golden = FOLDER / f"{name}.kv"
    kvant.save(kvant.load(golden), tmp_path / "again.kv")
    assert (tmp_path / "again.kv").read_bytes() == golden.read_bytes()


@pytest.mark.parametrize("name", CACHES)
def test_a_golden_cache_continues_like_one_of_today(name: str) -> None:
    golden, today = kvant.load(FOLDER / f"{name}.kv"), CACHES[name]()
    assert golden.spec == today.spec and golden.length == today.length == ROWS
    for one, other in zip(continued(name, golden), continued(name, today), strict=True):
        torch.testing.assert_close(one, other)


def test_a_golden_session_continues_its_conversation() -> None:
    golden = Session.load(FOLDER / "session.kv", model_of("llama"), Numbers())
    today = session()
    replies = [
        [step.token for step in each.send("8 9", max_new_tokens=8)] for each in (golden, today)
    ]
    assert replies[0] == replies[1]


@pytest.mark.parametrize("name", STORES)
def test_a_golden_store_restores_its_prefix(name: str, tmp_path: Path) -> None:
    family, spec = STORES[name]
    store = shutil.copytree(FOLDER / "stores" / name, tmp_path / "store")
    restored, alone = reply(family, spec, store), reply(family, spec, None)
    assert restored.usage.restored_tokens >= 256
    assert restored.tokens == alone.tokens
