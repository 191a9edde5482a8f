"""Test that all torch backends agree and that unavailable ones are reported. Nothing is
compiled here.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant.bench.attend import filter_runnable, make_gpu_attention

NAMES = ["torch gqa", "torch folded", "torch by hand", "torch flash", "torch flex"]


def skip_compile(function: Any, **options: Any) -> Any:
    assert options == {"dynamic": False}  # otherwise a second length compiles with dynamic shapes
    return function


def exact_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute exact attention, where every query sees the rows up to itself."""
    group = q.shape[1] // keys.shape[1]
    q, keys, values = q.double(), *(x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = q @ keys.transpose(2, 3) * q.shape[3] ** -0.5
    rows, columns = scores.shape[2:]
    visible = torch.arange(columns) <= torch.arange(rows)[:, None] + columns - rows
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("batch", "group", "queries"), [*product((1, 3), (1, 4), (1, 5))])
def test_all_backends_give_the_same_output(batch: int, group: int, queries: int) -> None:
    heads, length, dim = 2, 64, 16
    q = torch.randn(batch, heads * group, queries, dim)
    keys, values = torch.randn(2, batch, heads, length, dim)
    backends, skipped = filter_runnable(
        make_gpu_attention(q, heads, length, skip_compile), keys, values
    )
    assert (list(backends), skipped) == (NAMES, [])
    right = exact_attention(q, keys, values)
    for name, way in backends.items():
        output = way(keys, values).reshape(right.shape).double()
        torch.testing.assert_close(output, right, atol=1e-5, rtol=1e-4, msg=name)


def test_unavailable_backend_is_skipped_and_reported() -> None:
    class Strange(Exception):
        pass

    def fails(keys: Tensor, values: Tensor) -> None:
        raise Strange("no kernel\nand a long story")

    def silent(keys: Tensor, values: Tensor) -> None:
        raise Strange

    backends = {"a": fails, "b": torch.add, "c": silent}
    runnable, skipped = filter_runnable(backends, torch.ones(1), torch.ones(1))
    assert list(runnable) == ["b"]
    assert skipped == ["a: Strange, no kernel", "c: Strange, no reason is given"]
