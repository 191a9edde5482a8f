"""Test that the output of a sequence does not depend on the other sequences of its batch."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from cache.tagged import assert_same
from cache.tiled import make_tiled_cache
from kvant import Cache, CacheSpec, attend, merge
from laws.cases import DTYPES, FORMATS, RETENTIONS, Case, list_readers, pairwise
from thin import thin_rows

LENGTHS = (70, 1, 200, 131)
CHUNKS = (1, 1, 70, 1, 5, 1)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make_single(case: Case, sequence: int, length: int) -> Cache:
    """Return one sequence with its own rows."""
    cache = make_tiled_cache(None, CacheSpec((case.spec,)), case.state().tiles)
    keys, values = (rows[:1] for rows in case.rows(10 + sequence, length))
    cache[0].append(keys, values, prefill="stored")
    return cache


def batched_equals_alone(case: Case) -> None:
    """Merged caches of other lengths and pools give the same outputs and rows.

    Then one of them is removed, and the others are reordered.
    """
    caches = [make_single(case, index, length) for index, length in enumerate(LENGTHS)]
    merged = merge(caches)
    assert merged.lengths == list(LENGTHS)
    for step, count in enumerate(CHUNKS):
        check_forward(case, merged, caches, count, step)
        if step == 2:
            merged.select([3, 0, 2])
            caches = [caches[index] for index in (3, 0, 2)]
    for index, cache in enumerate(caches):
        assert_same(merged.extract(index).snapshot(), cache.snapshot())
        cache.state.pools.check()
    merged.state.pools.check()


def check_forward(case: Case, merged: Cache, caches: list[Cache], count: int, step: int) -> None:
    rows = [[r[:1] for r in case.rows(100 * step + i, count)] for i in range(len(caches))]
    q = torch.cat([case.queries(100 * step + i, count)[:1] for i in range(len(caches))])
    keys, values = (torch.cat(sides) for sides in zip(*rows, strict=True))
    view = merged[0].append(keys, values, prefill="stored")
    views = [c[0].append(*r, prefill="stored") for c, r in zip(caches, rows, strict=True)]
    for backend in list_readers(view):
        batched: Tensor = attend(q, view, backend=backend)
        for index, view_ in enumerate(views):
            single = attend(q[index : index + 1], view_, backend=backend)
            error = (batched[index : index + 1].float() - single.float()).abs().max()
            assert error <= ROUNDING[case.dtype], f"{backend}, sequence {index}, step {step}"


@pytest.mark.parametrize(
    "case",
    thin_rows([(c,) for c in pairwise() if c.batch == 1], lambda row: astuple(row[0])),
    ids=str,
)
def test_law_pairwise(case: Case) -> None:
    batched_equals_alone(case)


@pytest.mark.laws
@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("keys", FORMATS)
def test_law_over_the_full_product(keys: str, values: str) -> None:
    for retention in RETENTIONS:
        for arena in ("step=1", "tail=0", "tail=9,step=64"):
            for dtype in DTYPES:
                batched_equals_alone(Case(keys, values, retention, arena, 1, dtype))
