"""What a sequence gets does not depend on which sequences it is computed with."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from cache.tagged import same
from kvant import Cache, CacheSpec, attend, merge
from laws.cases import DTYPES, FORMATS, RETENTIONS, Case, pairwise, readers
from thin import once

LENGTHS = (70, 1, 200, 131)
CHUNKS = (1, 1, 70, 1, 5, 1)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def alone(case: Case, which: int, length: int) -> Cache:
    """One sequence with rows of its own."""
    cache = Cache(spec=CacheSpec((case.spec,)), tiles=case.state().tiles)
    keys, values = (rows[:1] for rows in case.rows(10 + which, length))
    cache[0].append(keys, values, prefill="stored")
    return cache


def side_by_side_is_alone(case: Case) -> None:
    """Merged caches of other lengths, other pools among them: the same outputs and the same rows.

    Then without one of them, in another order.
    """
    caches = [alone(case, which, length) for which, length in enumerate(LENGTHS)]
    merged = merge(caches)
    assert merged.lengths == list(LENGTHS)
    for step, count in enumerate(CHUNKS):
        forward(case, merged, caches, count, step)
        if step == 2:
            merged.select([3, 0, 2])
            caches = [caches[which] for which in (3, 0, 2)]
    for which, cache in enumerate(caches):
        same(merged.extract(which).snapshot(), cache.snapshot())
        cache.check()
    merged.check()


def forward(case: Case, merged: Cache, caches: list[Cache], count: int, step: int) -> None:
    rows = [[r[:1] for r in case.rows(100 * step + i, count)] for i in range(len(caches))]
    q = torch.cat([case.queries(100 * step + i, count)[:1] for i in range(len(caches))])
    keys, values = (torch.cat(sides) for sides in zip(*rows, strict=True))
    view = merged[0].append(keys, values, prefill="stored")
    views = [c[0].append(*r, prefill="stored") for c, r in zip(caches, rows, strict=True)]
    for backend in readers(view):
        together: Tensor = attend(q, view, backend=backend)
        for which, one in enumerate(views):
            single = attend(q[which : which + 1], one, backend=backend)
            error = (together[which : which + 1].float() - single.float()).abs().max()
            assert error <= ROUNDING[case.dtype], f"{backend}, sequence {which}, step {step}"


@pytest.mark.parametrize(
    "case", once([(c,) for c in pairwise() if c.batch == 1], lambda row: astuple(row[0])), ids=str
)
def test_law_pairwise(case: Case) -> None:
    side_by_side_is_alone(case)


@pytest.mark.laws
@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("keys", FORMATS)
def test_law_over_the_full_product(keys: str, values: str) -> None:
    for retention in RETENTIONS:
        for arena in ("step=1", "tail=0", "tail=9,step=64"):
            for dtype in DTYPES:
                side_by_side_is_alone(Case(keys, values, retention, arena, 1, dtype))
