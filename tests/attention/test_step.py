"""Steps of decoding in which nothing changes but tensors, against append and attend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.kernels import DEVICE, GPU, needed
from kvant import Cache, CapacityError, UnsupportedView, attend
from kvant.attention.triton import operators
from kvant.attention.triton.step import Step
from layers.tagged import same

pytestmark = [
    needed,
    pytest.mark.usefixtures("pages_as_on_a_gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of NaN and infinity
]
OPERATORS = operators._put, operators._decode
SPECS = ("raw", "affine8,tail=3", "affine4/turbo3,tail=3", "raw,window=70,sinks=3")


def filled(text: str, count: int = 150, start: list[int] | None = None) -> Any:
    """A layer of fixed capacity with so many tokens, always the same."""
    state = Cache(1, f"{text},capacity=200,prefill=stored")[0]
    torch.manual_seed(1)
    state.append(*rows(count), start=start)
    return state


def rows(count: int) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, 2, count, 32), torch.randn(2, 2, count, 48)
    return keys.to(DEVICE), values.to(DEVICE)


def begun(state: Any) -> Step:
    view = state.expect()
    for side in (view.keys, view.values):  # what lies there could be no number, which equals none
        side.room[:, :, side.slot + side.count - 1 :] = 0
    return Step.of(view, torch.zeros(4, dtype=torch.int64, device=DEVICE))


def written(step: Step) -> Step:
    """With rows in all of the memory: what is in it otherwise may be no numbers."""
    for side in (step.view.keys, step.view.values):
        side.room.normal_()
    return step


def on(step: Step, state: Any) -> Step:
    """To the next token, behind more of them than one page has."""
    if state.length == step.until:
        assert step.follow(state.expect())
    step.place[0] = state.length + 1
    return step


def queries() -> Tensor:
    return torch.randn(2, 4, 1, 32).to(DEVICE)


@pytest.mark.parametrize("text", SPECS)
def test_steps_are_appends_and_attention(text: str) -> None:
    state, other = (filled(text, 190, start=[0, 9]) for _ in range(2))
    step = begun(state)
    for _ in range(8):  # at 195 a page falls due
        new = rows(1)
        q, view = queries(), other.append(*new)
        expected = attend(q, view, backend="reference")
        assert (on(step, state)(q, *new) - expected).abs().max() < 1e-5
        state.arrive()
    same(state.snapshot(), other.snapshot())


@pytest.mark.parametrize("text", SPECS[1:3])
def test_rows_and_queries_lie_anyhow(text: str) -> None:
    state, other = (filled(text) for _ in range(2))
    step = begun(state)
    for lies in (
        lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        lambda x: torch.stack((x, -x), -1)[..., 0],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        on(step, state)
        q, (keys, values) = queries(), rows(1)
        expected = attend(q, other.append(keys, values), backend="reference")
        assert (step(lies(q), lies(keys), lies(values)) - expected).abs().max() < 1e-5
        state.arrive()


@pytest.mark.filterwarnings("ignore:.*lru_cache")  # what it holds is the same for ever
@pytest.mark.parametrize("text", SPECS)
def test_a_step_is_one_graph(text: str) -> None:
    state, other = (filled(text) for _ in range(2))
    step = begun(state)
    step.place[0] = state.length

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        step.place[0].add_(1)
        return step(q, keys, values, softcap=9.0)

    for _ in range(3):
        q, new = queries(), rows(1)
        expected = attend(q, other.append(*new), softcap=9.0, backend="reference")
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
        patch.setattr(operators, "_put", take)
        patch.setattr(operators, "_decode", take)
        with pytest.raises(Taken):
            step(queries(), *rows(1))
    for operator, args in zip(OPERATORS, given, strict=True):
        torch.library.opcheck(operator, args)


def test_steps_end_where_the_memory_or_the_sealed_pages_do() -> None:
    assert begun(filled("raw")).until == 200
    assert begun(filled("affine8,tail=3")).until == 194  # with the next one 192 rows are due
    with pytest.raises(CapacityError, match="201 tokens for a capacity of 200"):
        begun(filled("raw", 200))
    with pytest.raises(CapacityError, match="no room for a step behind 191 tokens: the page of"):
        begun(filled("affine8,tail=0", 191))


@pytest.mark.parametrize("text", ["raw", "affine8,tail=3"])
def test_a_step_too_far_writes_nothing(text: str) -> None:
    """Behind the room of one head lies that of the next one."""
    step = written(begun(filled(text)))
    q, new = queries(), rows(1)
    step.place[0] = step.until
    last = step(q, *new)
    sides = step.view.keys, step.view.values
    before = [side.room.clone() for side in sides]
    for beyond in (1, 2, 50, 1 << 40):
        step.place[0] = step.until + beyond
        assert torch.equal(step(q, *rows(1)), last)
        for side, held in zip(sides, before, strict=True):
            assert torch.equal(side.room, held)


def test_a_step_does_not_follow_where_memory_moved() -> None:
    state = filled("affine8,tail=3")
    step = begun(state)
    place = step.place.clone()
    assert not step.follow(filled("affine8,tail=3").expect())
    state.clear()
    state.append(*rows(150))
    assert not step.follow(state.expect())
    assert torch.equal(step.place, place)


def test_what_steps_cannot_follow_is_said() -> None:
    with pytest.raises(CapacityError, match="2 tokens: steps can follow once 3 are there"):
        begun(filled("raw,sinks=3", 2))
    with pytest.raises(UnsupportedView, match="keys of Fp8"):
        begun(filled("fp8"))


def test_what_is_not_one_token_as_the_layer_holds_them_is_refused() -> None:
    step = begun(filled("affine8,tail=3"))
    q, (keys, values) = queries(), rows(1)
    before = step.view.keys.room.clone()
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
    assert torch.equal(step.view.keys.room.nan_to_num(), before.nan_to_num())


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("text", SPECS)
def test_a_captured_step_is_replayed(text: str) -> None:
    state, other = (filled(text) for _ in range(2))
    step, graph = begun(state), torch.cuda.CUDAGraph()
    q, (keys, values) = queries(), rows(1)
    step(q, keys, values)  # compiles
    with torch.cuda.graph(graph):
        out = step(q, keys, values)
    for t in range(3):
        new_q, new = queries(), rows(1)
        for held, fresh in zip((q, keys, values), (new_q, *new), strict=True):
            held.copy_(fresh)
        step.place[0] = 151 + t
        graph.replay()
        expected = attend(new_q, other.append(*new), backend="reference")
        assert (out - expected).abs().max() < 1e-5
