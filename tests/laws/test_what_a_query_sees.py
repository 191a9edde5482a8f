"""Test every query of every chunk against the rule, over all rows ever appended."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvant import attend
from kvant.recipes import Prefill
from laws import oracle
from laws.cases import Case, list_readers
from thin import thin_rows

CHUNKS = (63, 1, 7, 1, 130, 1, 63, 1, 2, 90)  # with single tokens that complete a page
FEW = (63, 1, 7, 1, 119, 1, 10)
CASES = [
    Case(*case, torch.float32)
    for case in (
        ("affine4", "affine4", "", "step=256,tail=0", 1),
        ("affine8", "turbo3", "sinks=3", "tail=9,step=64", "padded"),
        ("raw", "affine2", "", "tail=9,step=64", 3),
        ("turbo2", "raw", "window=70,sinks=4", "step=256,tail=0", "padded"),
        ("affine3", "affine4,rotate", "window=100,sinks=0", "tail=9,step=64", 1),
        ("turbo4", "turbo2", "", "start=150,tail=3", 1),
        ("raw", "raw", "window=70,sinks=4", "step=1", "padded"),
        ("affine6", "affine5", "", "page=128,tail=20,slack=0", 3),
        ("turbo2", "turbo2", "window=40,sinks=2", "slack=0,tail=60", 1),
    )
]


@pytest.mark.parametrize(
    ("case", "prefill", "chunks"),
    [
        *thin_rows((*row, FEW) for row in product(CASES, ["dense", "stored"])),
        *(
            pytest.param(*row, CHUNKS, marks=pytest.mark.laws)
            for row in product(CASES, ["dense", "stored"])
        ),
    ],
    ids=str,
)
def test_every_query_sees_the_rows_of_the_rule(
    case: Case, prefill: Prefill, chunks: tuple[int, ...]
) -> None:
    every_query_sees_what_the_rule_says(case, prefill, chunks)


def every_query_sees_what_the_rule_says(
    case: Case, prefill: Prefill, chunks: tuple[int, ...]
) -> None:
    state, spec = case.state(), case.spec
    keys, values = case.rows(0, sum(chunks))
    start = case.start or [0] * case.sequences
    q, place = case.queries(0, sum(chunks)), 0
    for count in chunks:
        rows = (r[:, :, place : place + count] for r in (keys, values))
        view = state.append(*rows, start=None if state.length else start, prefill=prefill)
        chunk_queries = q[:, :, place : place + count]
        got = {name: attend(chunk_queries, view, backend=name).cpu() for name in list_readers(view)}
        own_from = place if prefill == "dense" and count > 1 else place + count
        for query in range(place, place + count):
            expected_rows = oracle.visible_rows(
                spec, keys.cpu(), values.cpu(), start, query, own_from
            )
            expected = oracle.exact_attention(q[:, :, query : query + 1].cpu(), *expected_rows)
            for name, out in got.items():
                error = (out[:, :, query - place].double() - expected[:, :, 0]).abs().max()
                location = f"query {query} of the chunk at {place}, {name}"
                assert error < case.tolerance(name), location
        place += count


def test_prefill_modes_differ_where_they_should() -> None:
    """The oracle distinguishes them: only one keeps a long prompt's own rows dense."""
    case = CASES[0]
    keys, values = case.rows(0, 300)
    q = case.queries(0, 300)
    calls = {}
    for prefill in ("dense", "stored"):
        view = case.state().append(keys, values, prefill=prefill)  # type: ignore[arg-type]
        calls[prefill] = attend(q, view)
    assert (calls["dense"][:, :, :63] - calls["stored"][:, :, :63]).abs().max() < 1e-5
    assert (calls["dense"][:, :, 200:] - calls["stored"][:, :, 200:]).abs().max() > 1e-3
