"""Test decode steps that change tensors only, against append and attend."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.kernels import DEVICE, GPU, needed
from cache.tagged import assert_same
from kvant import Cache, UnsupportedView, attend
from kvant.attention.triton import token_operators as operators
from kvant.attention.triton.arguments import StaticTritonPageTable
from kvant.cache import merge
from kvant.cache.tokens import commit_tokens, plan_tokens
from kvant.replay.steps import TritonDecodeStep

pytestmark = [
    needed,
    pytest.mark.usefixtures("gpu_page_layout"),
    # the interpreter warns of NaN and infinity
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
OPERATORS = operators._write_token_op, operators._attend_token_op
SPECS = ("raw", "affine8,tail=3", "affine4/turbo3,tail=3", "raw,window=70,sinks=3")

# Defaults of the other parameters, the same for each test.
MIXED = [pytest.param(text, marks=[] if "/" in text else pytest.mark.laws) for text in SPECS]


def make_filled_cache(text: str, count: int = 150, start: list[int] | None = None) -> Cache:
    """Return a layer of fixed capacity with a number of tokens, always the same."""
    cache = Cache(1, f"{text},capacity=200,prefill=stored")
    torch.manual_seed(1)
    cache[0].append(*make_rows(count), start=start)
    return cache


def make_rows(count: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(batch, 2, count, 32), torch.randn(batch, 2, count, 48)
    return keys.to(DEVICE), values.to(DEVICE)


def make_step(cache: Cache) -> TritonDecodeStep:
    """Return a layer that expects a token; later memory is zeroed, since NaN equals nothing."""
    (change,) = plan_tokens(cache)
    pages = cache[0].make_view(change)
    for side in (pages.keys, pages.values):
        side.open.nan_to_num_()
    return TritonDecodeStep.from_view(pages, StaticTritonPageTable(change, DEVICE))


def fill_memory(step: TritonDecodeStep) -> TritonDecodeStep:
    """Fill all of the memory with rows, since unused memory may hold NaN."""
    for side in (step.view.keys, step.view.values):
        side.open.normal_()
    return step


def advance(step: TritonDecodeStep, cache: Cache) -> TritonDecodeStep:
    """Advance to the next token."""
    (change,) = plan_tokens(cache)
    if change.is_steady:
        step.page_table.advance()
    else:
        assert step.rebind(cache[0].make_view(change))
        assert step.page_table.update(change)
    return step


def make_queries(batch: int = 2) -> Tensor:
    return torch.randn(batch, 4, 1, 32).to(DEVICE)


@pytest.mark.parametrize("text", SPECS)
def test_steps_equal_append_plus_attention(text: str) -> None:
    cache, other = (make_filled_cache(text, 190, start=[0, 9]) for _ in range(2))
    step = make_step(cache)
    for t in range(6):  # at 195 a page is sealed, and after 192 another begins
        new = make_rows(1)
        q, view = make_queries(), other[0].append(*new)
        expected = attend(q, view, backend="reference")
        step = advance(step, cache) if t else step
        assert (step(q, *new) - expected).abs().max() < 1e-5
        commit_tokens(cache, step.backend)
    assert_same(cache.snapshot(), other.snapshot())
    assert cache.stats()["attended"] == {step.backend: 6}
    cache.state.pools.check()


@pytest.mark.parametrize("text", MIXED)
def test_sequences_of_different_lengths_step_together(text: str) -> None:
    """Some sequences share pages that a step must not write to."""
    merged = []
    for _ in range(2):
        first, two = make_filled_cache(text, 130), make_filled_cache(text, 64)
        merged.append(merge([first.extract(0), two.extract(0), first.extract(1)]))
    cache, second = merged
    step = make_step(cache)
    for t in range(4):  # at 67 a page is sealed, and after 64 another begins
        new = make_rows(1, 3)
        q, view = make_queries(3), second[0].append(*new)
        expected = attend(q, view, backend="reference")
        step = advance(step, cache) if t else step
        assert (step(q, *new) - expected).abs().max() < 1e-5
        commit_tokens(cache, step.backend)
    assert_same(cache.snapshot(), second.snapshot())


@pytest.mark.parametrize("text", SPECS[1:3])
def test_rows_and_queries_may_have_any_strides(text: str) -> None:
    cache, other = (make_filled_cache(text) for _ in range(2))
    step = make_step(cache)
    for t, layout in enumerate(
        (
            lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
            lambda x: torch.stack((x, -x), -1)[..., 0],
            lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        )
    ):
        step = advance(step, cache) if t else step
        q, (keys, values) = make_queries(), make_rows(1)
        expected = attend(q, other[0].append(keys, values), backend="reference")
        assert (step(layout(q), layout(keys), layout(values)) - expected).abs().max() < 1e-5
        commit_tokens(cache, step.backend)


@pytest.mark.filterwarnings("ignore:.*lru_cache")  # its cached values never change
@pytest.mark.parametrize("text", MIXED)
def test_step_compiles_to_one_graph(text: str) -> None:
    cache, other = (make_filled_cache(text) for _ in range(2))
    step = make_step(cache)
    lengths = step.page_table.lengths
    lengths.sub_(1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def record_graph(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        lengths.add_(1)
        return step(q, keys, values, softcap=9.0)

    for _ in range(3):
        q, new = make_queries(), make_rows(1)
        expected = attend(q, other[0].append(*new), softcap=9.0, backend="reference")
        assert (record_graph(q, *new) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("text", SPECS[2:])
def test_operators_pass_opcheck(text: str) -> None:
    step, calls = fill_memory(make_step(make_filled_cache(text))), []

    class Taken(Exception):
        pass

    def take(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise Taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "_write_token_op", take)
        patch.setattr(operators, "_attend_token_op", take)
        with pytest.raises(Taken):
            step(make_queries(), *make_rows(1))
    for operator, args in zip(OPERATORS, calls, strict=True):
        torch.library.opcheck(operator, args)


@pytest.mark.parametrize("text", ["raw", "affine8,tail=3"])
def test_step_beyond_capacity_writes_nothing(text: str) -> None:
    """The page of the next head follows the page of this one in memory."""
    step = fill_memory(make_step(make_filled_cache(text)))
    q, new = make_queries(), make_rows(1)
    last_position = 151 + step.view.page_table.steady_tokens
    step.page_table.lengths.fill_(last_position)
    last = step(q, *new)
    sides = step.view.keys, step.view.values
    before = [side.open.clone() for side in sides]
    for beyond in (1, 2, 50, 1 << 40):
        step.page_table.lengths.fill_(last_position + beyond)
        assert torch.equal(step(q, *make_rows(1)), last)
        for side, side_before in zip(sides, before, strict=True):
            assert torch.equal(side.open, side_before)


def test_steps_inside_padding_write_nothing() -> None:
    cache = make_filled_cache("raw", 20, start=[0, 30])
    step = make_step(cache)
    before = step.view.keys.open.clone()
    out = step(make_queries(), *make_rows(1))
    assert out[0].any() and not out[1].any()
    changed_slots = (step.view.keys.open != before).any(-1).any(1)  # per slot and row
    assert changed_slots.nonzero().tolist() == [[int(step.view.page_table.open_table[0, 0]), 20]]


def test_step_is_invalid_after_the_pool_reallocates() -> None:
    cache = make_filled_cache("affine8,tail=3")
    step = make_step(cache)
    other = make_filled_cache("affine8,tail=3")
    assert not step.rebind(other[0].make_view(*plan_tokens(other)))
    cache.clear()
    cache[0].append(*make_rows(150))
    assert not step.rebind(cache[0].make_view(*plan_tokens(cache)))


def test_decode_step_is_invalid_without_reserved_slots() -> None:
    """More sequences, sequences of another group, or pages beyond the tables."""
    cache = Cache(1, "raw")
    cache[0].append(*make_rows(20))
    (change,) = plan_tokens(cache)
    place = StaticTritonPageTable(change, DEVICE)
    before = place.integers.clone()
    for text, batch, count in (("raw", 3, 20), ("affine8", 2, 20), ("raw", 2, 500)):
        other = Cache(1, text)
        other[0].append(*make_rows(count, batch))
        assert not place.update(plan_tokens(other)[0])
        assert torch.equal(place.integers, before)
    assert place.update(change)


def test_unsupported_layers_give_a_reason() -> None:
    with pytest.raises(UnsupportedView, match="keys of Fp8"):
        make_step(make_filled_cache("fp8"))


def test_rows_of_wrong_shape_or_dtype_are_refused() -> None:
    step = make_step(make_filled_cache("affine8,tail=3"))
    q, (keys, values) = make_queries(), make_rows(1)
    before = step.view.keys.open.clone()
    for name, new_rows in {
        r"keys \[2, 2, 2, 32\]": (q, *make_rows(2)),
        r"keys \[2, 2, 1, 32\] of torch.float16": (q, keys.half(), values),
        r"values \[2, 2, 1, 48\] of .* on meta": (q, keys, values.to("meta")),
        r"values \[2, 2, 1, 32\]": (q, keys, keys),
        r"keys \[2, 32\]": (q, keys[:, 0, 0], values),
        r"queries \[2, 4, 2, 32\]": (q.repeat(1, 1, 2, 1), keys, values),
        r"queries \[2, 3, 1, 32\]": (q[:, :3], keys, values),
        r"queries .* of torch.float64": (q.double(), keys, values),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}.*: this step takes"):
            step(*new_rows)
    with pytest.raises(ValueError, match=r"sink_logits of shape \[3\] for 4 heads"):
        step(q, keys, values, sink_logits=torch.zeros(3))
    assert torch.equal(step.view.keys.open, before)


def test_step_positions_are_right_under_python_O() -> None:
    code = (
        "import torch; from kvant import Cache; from kvant.cache.tokens import plan_tokens;"
        "from kvant.attention.triton import arguments;"
        "cache = Cache(1, 'raw'); cache[0].append(*[torch.ones(1, 1, 70, 32)] * 2);"
        "place = arguments.StaticTritonPageTable(*plan_tokens(cache), torch.device('cpu'));"
        "print(place.lengths.tolist())"
    )
    ran = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert ran.stdout == "[71]\n", ran.stderr


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("text", SPECS)
def test_captured_step_is_replayed(text: str) -> None:
    cache, other = (make_filled_cache(text) for _ in range(2))
    step, graph = make_step(cache), torch.cuda.CUDAGraph()
    q, (keys, values) = make_queries(), make_rows(1)
    step(q, keys, values)  # compile
    with torch.cuda.graph(graph):
        out = step(q, keys, values)
    for t in range(3):
        new_q, new = make_queries(), make_rows(1)
        for static_input, fresh in zip((q, keys, values), (new_q, *new), strict=True):
            static_input.copy_(fresh)
        step = advance(step, cache) if t else step
        graph.replay()
        commit_tokens(cache, step.backend)
        expected = attend(new_q, other[0].append(*new), backend="reference")
        assert (out - expected).abs().max() < 1e-5
