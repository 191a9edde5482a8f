"""All ways of torch say the same, and what does not run is said. Nothing is compiled here."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant.bench.device import filter_runnable, make_gpu_attention

NAMES = ["torch gqa", "torch folded", "torch by hand", "torch flash", "torch flex"]


def uncompiled(function: Any, **how: Any) -> Any:
    assert how == {"dynamic": False}  # or a second length would be compiled as one that changes
    return function


def exact(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Every query sees the rows up to its own: the newest of them."""
    group = q.shape[1] // keys.shape[1]
    q, keys, values = q.double(), *(x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = q @ keys.transpose(2, 3) * q.shape[3] ** -0.5
    rows, columns = scores.shape[2:]
    seen = torch.arange(columns) <= torch.arange(rows)[:, None] + columns - rows
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("batch", "group", "queries"), [*product((1, 3), (1, 4), (1, 5))])
def test_all_say_the_same(batch: int, group: int, queries: int) -> None:
    heads, length, dim = 2, 64, 16
    q = torch.randn(batch, heads * group, queries, dim)
    keys, values = torch.randn(2, batch, heads, length, dim)
    ways, skipped = filter_runnable(make_gpu_attention(q, heads, length, uncompiled), keys, values)
    assert (list(ways), skipped) == (NAMES, [])
    right = exact(q, keys, values)
    for name, way in ways.items():
        said = way(keys, values).reshape(right.shape).double()
        torch.testing.assert_close(said, right, atol=1e-5, rtol=1e-4, msg=name)


def test_what_does_not_run_is_left_out_and_said() -> None:
    class Strange(Exception):
        pass

    def fails(keys: Tensor, values: Tensor) -> None:
        raise Strange("no kernel\nand a long story")

    def silent(keys: Tensor, values: Tensor) -> None:
        raise Strange

    ways = {"a": fails, "b": torch.add, "c": silent}
    found, skipped = filter_runnable(ways, torch.ones(1), torch.ones(1))
    assert list(found) == ["b"]
    assert skipped == ["a: Strange, no kernel", "c: Strange, no reason is given"]
