"""Steps of decoding in which nothing changes but tensors, against append and attend."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.kernels import DEVICE, GPU, needed
from cache.tagged import same
from kvant import Cache, UnsupportedView, attend
from kvant.attention.triton import decode_step as operators
from kvant.attention.triton.arguments import StaticTritonPageTable
from kvant.attention.triton.decode_step import TritonDecodeStep
from kvant.cache import merge

pytestmark = [
    needed,
    pytest.mark.usefixtures("pages_as_on_a_gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of NaN and infinity
]
OPERATORS = operators._write_token_op, operators._attend_token_op
SPECS = ("raw", "affine8,tail=3", "affine4/turbo3,tail=3", "raw,window=70,sinks=3")

# What else a test is about is the same for each of them.
MIXED = [pytest.param(text, marks=[] if "/" in text else pytest.mark.laws) for text in SPECS]


def filled(text: str, count: int = 150, start: list[int] | None = None) -> Cache:
    """A layer of fixed capacity with so many tokens, always the same."""
    cache = Cache(1, f"{text},capacity=200,prefill=stored")
    torch.manual_seed(1)
    cache[0].append(*rows(count), start=start)
    return cache


def rows(count: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(batch, 2, count, 32), torch.randn(batch, 2, count, 48)
    return keys.to(DEVICE), values.to(DEVICE)


def begun(cache: Cache) -> TritonDecodeStep:
    """One that expects a token; what lies behind could be no number, which equals none."""
    (change,) = cache.expect()
    pages = cache[0].make_view(change)
    for side in (pages.keys, pages.values):
        side.open.nan_to_num_()
    return TritonDecodeStep.from_view(pages, StaticTritonPageTable(change, DEVICE))


def written(step: TritonDecodeStep) -> TritonDecodeStep:
    """With rows in all of the memory: what is in it otherwise may be no numbers."""
    for side in (step.view.keys, step.view.values):
        side.open.normal_()
    return step


def on(step: TritonDecodeStep, cache: Cache) -> TritonDecodeStep:
    """To the next token."""
    (change,) = cache.expect()
    if change.is_steady:
        step.page_table.advance()
    else:
        assert step.rebind(cache[0].make_view(change))
        assert step.page_table.update(change)
    return step


def queries(batch: int = 2) -> Tensor:
    return torch.randn(batch, 4, 1, 32).to(DEVICE)


@pytest.mark.parametrize("text", SPECS)
def test_steps_are_appends_and_attention(text: str) -> None:
    cache, other = (filled(text, 190, start=[0, 9]) for _ in range(2))
    step = begun(cache)
    for t in range(6):  # at 195 a page falls due, and behind 192 another begins
        new = rows(1)
        q, view = queries(), other[0].append(*new)
        expected = attend(q, view, backend="reference")
        step = on(step, cache) if t else step
        assert (step(q, *new) - expected).abs().max() < 1e-5
        cache.arrive(step.backend)
    same(cache.snapshot(), other.snapshot())
    assert cache.stats()["attended"] == {step.backend: 6}
    cache.check()


@pytest.mark.parametrize("text", MIXED)
def test_sequences_of_any_lengths_step_together(text: str) -> None:
    """Some of which share pages that a step may not write to."""
    merged = []
    for _ in range(2):
        one, two = filled(text, 130), filled(text, 64)
        merged.append(merge([one.extract(0), two.extract(0), one.extract(1)]))
    cache, other = merged
    step = begun(cache)
    for t in range(4):  # at 67 a page falls due, and behind 64 another begins
        new = rows(1, 3)
        q, view = queries(3), other[0].append(*new)
        expected = attend(q, view, backend="reference")
        step = on(step, cache) if t else step
        assert (step(q, *new) - expected).abs().max() < 1e-5
        cache.arrive(step.backend)
    same(cache.snapshot(), other.snapshot())


@pytest.mark.parametrize("text", SPECS[1:3])
def test_rows_and_queries_lie_anyhow(text: str) -> None:
    cache, other = (filled(text) for _ in range(2))
    step = begun(cache)
    for t, lies in enumerate(
        (
            lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
            lambda x: torch.stack((x, -x), -1)[..., 0],
            lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        )
    ):
        step = on(step, cache) if t else step
        q, (keys, values) = queries(), rows(1)
        expected = attend(q, other[0].append(keys, values), backend="reference")
        assert (step(lies(q), lies(keys), lies(values)) - expected).abs().max() < 1e-5
        cache.arrive(step.backend)


@pytest.mark.filterwarnings("ignore:.*lru_cache")  # what it holds is the same for ever
@pytest.mark.parametrize("text", MIXED)
def test_a_step_is_one_graph(text: str) -> None:
    cache, other = (filled(text) for _ in range(2))
    step = begun(cache)
    lengths = step.page_table.lengths
    lengths.sub_(1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        lengths.add_(1)
        return step(q, keys, values, softcap=9.0)

    for _ in range(3):
        q, new = queries(), rows(1)
        expected = attend(q, other[0].append(*new), softcap=9.0, backend="reference")
        assert (compiled(q, *new) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("text", SPECS[2:])
def test_its_operators_are_what_they_say(text: str) -> None:
    step, given = written(begun(filled(text))), []

    class Taken(Exception):
        pass

    def take(*args: Any) -> None:
        given.append(args)
        if len(given) == 2:
            raise Taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "_write_token_op", take)
        patch.setattr(operators, "_attend_token_op", take)
        with pytest.raises(Taken):
            step(queries(), *rows(1))
    for operator, args in zip(OPERATORS, given, strict=True):
        torch.library.opcheck(operator, args)


@pytest.mark.parametrize("text", ["raw", "affine8,tail=3"])
def test_a_step_too_far_writes_nothing(text: str) -> None:
    """Behind the page of one head lies that of the next one."""
    step = written(begun(filled(text)))
    q, new = queries(), rows(1)
    most = 151 + step.view.page_table.steady_tokens
    step.page_table.lengths.fill_(most)
    last = step(q, *new)
    sides = step.view.keys, step.view.values
    before = [side.open.clone() for side in sides]
    for beyond in (1, 2, 50, 1 << 40):
        step.page_table.lengths.fill_(most + beyond)
        assert torch.equal(step(q, *rows(1)), last)
        for side, held in zip(sides, before, strict=True):
            assert torch.equal(side.open, held)


def test_padding_that_is_still_to_come_writes_nothing() -> None:
    cache = filled("raw", 20, start=[0, 30])
    step = begun(cache)
    before = step.view.keys.open.clone()
    out = step(queries(), *rows(1))
    assert out[0].any() and not out[1].any()
    written = (step.view.keys.open != before).any(-1).any(1)  # by slot and row
    assert written.nonzero().tolist() == [[int(step.view.page_table.open_table[0, 0]), 20]]


def test_a_step_does_not_follow_where_memory_moved() -> None:
    cache = filled("affine8,tail=3")
    step = begun(cache)
    other = filled("affine8,tail=3")
    assert not step.rebind(other[0].make_view(*other.expect()))
    cache.clear()
    cache[0].append(*rows(150))
    assert not step.rebind(cache[0].make_view(*cache.expect()))


def test_a_place_does_not_follow_where_it_has_no_room() -> None:
    """For more sequences, for others than its kind, or for pages beyond its tables."""
    cache = Cache(1, "raw")
    cache[0].append(*rows(20))
    (change,) = cache.expect()
    place = StaticTritonPageTable(change, DEVICE)
    before = place.integers.clone()
    for text, batch, count in (("raw", 3, 20), ("affine8", 2, 20), ("raw", 2, 500)):
        other = Cache(1, text)
        other[0].append(*rows(count, batch))
        assert not place.update(other.expect()[0])
        assert torch.equal(place.integers, before)
    assert place.update(change)


def test_what_steps_cannot_follow_is_said() -> None:
    with pytest.raises(UnsupportedView, match="keys of Fp8"):
        begun(filled("fp8"))


def test_what_is_not_one_token_as_the_layer_holds_them_is_refused() -> None:
    step = begun(filled("affine8,tail=3"))
    q, (keys, values) = queries(), rows(1)
    before = step.view.keys.open.clone()
    for name, given in {
        r"keys \[2, 2, 2, 32\]": (q, *rows(2)),
        r"keys \[2, 2, 1, 32\] of torch.float16": (q, keys.half(), values),
        r"values \[2, 2, 1, 48\] of .* on meta": (q, keys, values.to("meta")),
        r"values \[2, 2, 1, 32\]": (q, keys, keys),
        r"keys \[2, 32\]": (q, keys[:, 0, 0], values),
        r"queries \[2, 4, 2, 32\]": (q.repeat(1, 1, 2, 1), keys, values),
        r"queries \[2, 3, 1, 32\]": (q[:, :3], keys, values),
        r"queries .* of torch.float64": (q.double(), keys, values),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}.*: a step takes"):
            step(*given)
    with pytest.raises(ValueError, match=r"sink_logits \[3\] for 4 heads"):
        step(q, keys, values, sink_logits=torch.zeros(3))
    assert torch.equal(step.view.keys.open, before)


def test_a_place_is_where_sequences_are_where_python_leaves_assertions_out() -> None:
    code = (
        "import torch; from kvant import Cache; from kvant.attention.triton import arguments;"
        "cache = Cache(1, 'raw'); cache[0].append(*[torch.ones(1, 1, 70, 32)] * 2);"
        "place = arguments.StaticTritonPageTable(*cache.expect(), torch.device('cpu'));"
        "print(place.lengths.tolist())"
    )
    ran = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert ran.stdout == "[71]\n", ran.stderr


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("text", SPECS)
def test_a_captured_step_is_replayed(text: str) -> None:
    cache, other = (filled(text) for _ in range(2))
    step, graph = begun(cache), torch.cuda.CUDAGraph()
    q, (keys, values) = queries(), rows(1)
    step(q, keys, values)  # compiles
    with torch.cuda.graph(graph):
        out = step(q, keys, values)
    for t in range(3):
        new_q, new = queries(), rows(1)
        for held, fresh in zip((q, keys, values), (new_q, *new), strict=True):
            held.copy_(fresh)
        step = on(step, cache) if t else step
        graph.replay()
        cache.arrive(step.backend)
        expected = attend(new_q, other[0].append(*new), backend="reference")
        assert (out - expected).abs().max() < 1e-5
