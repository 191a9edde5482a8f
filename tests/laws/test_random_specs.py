"""Test random recipes, chunks and rewinds within slack: every query against the rule."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from cache.tagged import LayerCache
from cache.tiled import Tiled
from kvant import LayerSpec, attend
from kvant.codecs import Affine, Codebook, Fp8, Raw
from kvant.codecs.frames import Rotation
from kvant.retention import KeepAll, Window
from laws import oracle

AFFINE = (Affine(8, 16), Affine(3, 16), Affine(4, 16, Rotation(5)))
CODECS = (Raw(), *AFFINE, Fp8(), Codebook(4), Codebook(2))
DIM = 16

codecs = st.sampled_from(CODECS)
sinks = st.integers(0, 5)
recipes = st.builds(
    LayerSpec,
    keys=codecs,
    values=codecs,
    retention=st.one_of(st.builds(KeepAll, sinks), st.builds(Window, st.integers(1, 40), sinks)),
    page=st.sampled_from([4, 8, 16]),
    tail=st.one_of(st.none(), st.integers(0, 30)),
    slack=st.integers(0, 12),
    dense_until=st.integers(0, 40),
    prefill=st.sampled_from(["dense", "stored"]),
    step=st.sampled_from([1, 8, 256]),
    capacity=st.sampled_from([None, 400]),
    chunk=st.sampled_from([None, None, 16]),
)
# tokens to append, then tokens to rewind
steps = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12)), min_size=1, max_size=8)
paddings = st.sampled_from([[0], [0, 3], [2, 17]])


def run_script(
    spec: LayerSpec, script: list[tuple[int, int]], start: list[int], tiled: bool
) -> None:
    state = LayerCache(spec, Tiled(4, 4) if tiled else None)
    shape = (len(start), 2, sum(count for count, _ in script), DIM)
    fresh = torch.randn(2, *shape)
    rows: list[Tensor] = [torch.empty(len(start), 2, 0, DIM)] * 2
    place = furthest = 0
    for count, num_rewound in script:
        new = fresh[:, :, :, place : place + count]
        place += count
        q = torch.randn(len(start), 4, count, DIM)
        length = state.length
        view = state.append(new[0], new[1], start=None if length else start)
        rows = [torch.cat([old, more], 2) for old, more in zip(rows, new, strict=True)]
        own_from = length if spec.prefill == "dense" and count > 1 else state.length
        check_queries(spec, rows, start, q, attend(q, view), own_from)
        check_queries(
            spec, rows, start, q[:, :, -1:], attend(q[:, :, -1:], state.view()), state.length
        )
        furthest = max(furthest, state.length)
        new_length = max(state.length - num_rewound, furthest - spec.slack, 0)
        state.rewind(min(new_length, state.length))  # slack counts from the maximum length
        rows = [row[:, :, : state.length] for row in rows]
        assert state.stats.rewinds_decoded == 0


def check_queries(
    spec: LayerSpec, rows: list[Tensor], start: list[int], q: Tensor, got: Tensor, own_from: int
) -> None:
    length = rows[0].shape[2]
    for i in range(q.shape[2]):
        query = length - q.shape[2] + i
        expected_rows = oracle.visible_rows(spec, *rows, start, query, own_from)
        expected = oracle.exact_attention(q[:, :, i : i + 1], *expected_rows)
        assert (got[:, :, i : i + 1].double() - expected).abs().max() < 1e-5, f"query {query}"


@given(spec=recipes, script=steps, start=paddings, tiled=st.booleans())
@settings(max_examples=25)
def test_random_lives(
    spec: LayerSpec, script: list[tuple[int, int]], start: list[int], tiled: bool
) -> None:
    run_script(spec, script, start, tiled)


@pytest.mark.laws
@given(spec=recipes, script=steps, start=paddings, tiled=st.booleans())
@settings(max_examples=1500)
def test_many_random_lives(
    spec: LayerSpec, script: list[tuple[int, int]], start: list[int], tiled: bool
) -> None:
    run_script(spec, script, start, tiled)
