"""The laws of a recode: what is read, stored as a new layer of the other recipe stores it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from cache.tagged import One
from cache.tiled import Tiled
from kvant import SpecError, attend, parse
from kvant.codecs import Raw
from kvant.contracts import Snapshot
from kvant.recipes import LayerSpec
from kvant.retention import KeepAll, Window
from laws.cases import Case, everything, grown, pairwise, put, thinned

Law = Callable[[Case, int], None]
LENGTHS = (63, 64, 65, 192, 207, 261)  # about an edge, one slack behind it, and between


def bits(a: Snapshot, b: Snapshot) -> None:
    assert a.numbers == b.numbers
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        assert torch.equal(a.tensors[name], b.tensors[name]), name


def alike(case: Case, a: One, b: One) -> None:
    """They read the same, attend the same and take the same memory."""
    assert a.nbytes <= b.nbytes  # pages that a chunk let go are free, and those of a capacity
    told_alike(case, a, b)


def told_alike(case: Case, a: One, b: One) -> None:
    """The same, but for the room that they take beside their rows."""
    assert (a.length, a.held, a.nbytes_used) == (b.length, b.held, b.nbytes_used)
    assert torch.equal(a.positions(), b.positions())
    for one, other in zip(a.read(), b.read(), strict=True):
        assert torch.equal(one, other)
    q = case.queries(a.length, 1)
    assert torch.equal(attend(q, a.view()), attend(q, b.view()))


def recode(state: One, spec: LayerSpec) -> None:
    state.recode(spec)


def step(case: Case, *states: One, count: int = 1) -> None:
    """The same new tokens for each, one by one."""
    for _ in range(count):
        keys, values = case.rows(5000 + states[0].length, 1)
        for state in states:
            put(case, state, keys, values)


def raw(case: Case, retention: str = "") -> Case:
    return replace(case, keys="raw", values="raw", retention=retention)


def refed(case: Case, state: One, spec: LayerSpec) -> One:
    """A new layer with what the state reads."""
    fresh = One(spec, state.tiles)
    fresh.append(*state.read(), start=case.start, prefill="stored")
    return fresh


def other(case: Case) -> LayerSpec:
    """A recipe with codecs, page and tail that no case has; keys lie in a frame."""
    turbo, affine = (parse(text, 1).layers[0] for text in ("turbo3,seed=5", "affine4,group=16"))
    assert isinstance(turbo, LayerSpec) and isinstance(affine, LayerSpec)
    return replace(affine, keys=turbo.keys, tail=7, page=128, retention=case.spec.retention)


def raw_rows_become_what_a_new_layer_holds(case: Case, length: int) -> None:
    """To the byte, and so does all that follows."""
    state, fresh = grown(raw(case), length), grown(case, length)
    state.tiles = fresh.tiles
    recode(state, case.spec)
    bits(state.snapshot(), fresh.snapshot())
    alike(case, state, fresh)
    step(case, state, fresh, count=20)
    bits(state.snapshot(), fresh.snapshot())
    state.rewind(length + 4)
    fresh.rewind(length + 4)
    alike(case, state, fresh)


def rows_of_a_window_become_a_shorter_one(case: Case, length: int) -> None:
    """Also where its first page has lost its oldest rows, which nobody can see."""
    if "window" not in case.retention:
        return
    state, fresh = grown(raw(case, "window=210,sinks=4"), length), grown(case, length)
    recode(state, case.spec)
    alike(case, state, fresh)
    for back in (1, 9):
        to = state.length - back
        if state.reachable(to) == to:
            state.rewind(to)
            fresh.rewind(to)
            alike(case, state, fresh)
    for _ in range(70):
        step(case, state, fresh)
    alike(case, state, fresh)


def other_formats_are_given_what_is_read(case: Case, length: int) -> None:
    state = grown(case, length)
    if state.held < length:
        return
    fresh = refed(case, state, other(case))
    recode(state, other(case))
    alike(case, state, fresh)
    step(case, state, fresh, count=140)
    alike(case, state, fresh)


def raw_again_reads_the_same(case: Case, length: int) -> None:
    state = grown(case, length)
    before = state.read()
    recode(state, replace(case.spec, keys=Raw(), values=Raw()))
    for one, now in zip(before, state.read(), strict=True):
        assert torch.equal(one, now)


def what_stays_is_not_encoded_again(case: Case, length: int) -> None:
    """Another step changes memory only: all that there is stays, to the byte."""
    state = grown(case, length)
    before = state.snapshot()
    recode(state, case.spec)
    bits(state.snapshot(), before)
    recode(state, replace(case.spec, step=7))
    bits(state.snapshot(), before)
    assert state.stats.sealed_pages == grown(case, length).stats.sealed_pages


def what_is_gone_is_refused(case: Case, length: int) -> None:
    state = grown(case, length)
    before, spec = state.snapshot(), state.spec
    held, sinks = state.held, spec.retention.sinks
    refused: list[KeepAll | Window] = [KeepAll(), Window(length)] if held < length else []
    if held < length:
        refused.append(Window(1, sinks=sinks + 1))
    for retention in refused:
        with pytest.raises(SpecError, match=f"of {length} tokens|sinks="):
            state.recode(replace(other(case), retention=retention))
        assert state.spec == spec
        bits(state.snapshot(), before)


def forks_are_independent(case: Case, length: int) -> None:
    state = grown(case, length)
    twin, before = state.fork(), state.snapshot()
    recode(state, other(case))
    bits(twin.snapshot(), before)
    fork = state.fork()
    alike(case, state, fork)
    restored = One(state.spec, state.tiles)
    restored.restore(state.snapshot())
    told_alike(case, state, restored)
    step(case, state, fork, restored, count=3)
    bits(state.snapshot(), fork.snapshot())
    bits(state.snapshot(), restored.snapshot())


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        raw_rows_become_what_a_new_layer_holds,
        rows_of_a_window_become_a_shorter_one,
        other_formats_are_given_what_is_read,
        raw_again_reads_the_same,
        what_stays_is_not_encoded_again,
        what_is_gone_is_refused,
        forks_are_independent,
    )
}


def _named(one: Any) -> str:
    return one if isinstance(one, str) else "-".join(map(str, one))


def spread(cases: Iterable[Case]) -> Iterator[tuple[Case, int]]:
    """Each case at one length; rows that lie apart by heads have tests of their own (pruning)."""
    dice = random.Random(0)
    return ((case, dice.choice(LENGTHS)) for case in cases if "prune" not in case.retention)


@pytest.mark.parametrize(("law", "case_at"), thinned(LAWS, spread(pairwise())), ids=_named)
def test_law(law: str, case_at: tuple[Case, int]) -> None:
    LAWS[law](*case_at)


@pytest.mark.laws
@pytest.mark.parametrize("part", range(16))
def test_laws_everywhere(part: int) -> None:
    """Two laws a case: all of them would take longer than all other laws together."""
    dice = random.Random(part)
    for case, length in islice(spread(everything()), part, None, 16):
        for law in dice.sample(sorted(LAWS), 2):
            LAWS[law](case, length)


def test_tiles_stay() -> None:
    state = One(other(Case("raw", "raw", "", "step=1", 1, torch.float32)), Tiled())
    case = Case("affine4", "affine4", "", "step=1", 1, torch.float32)
    put(case, state, *case.rows(0, 300))
    fresh = refed(case, state, case.spec)
    recode(state, case.spec)
    alike(case, state, fresh)
    assert state.tiles is not None
