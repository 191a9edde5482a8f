"""Test the laws of a recode: rows read back, stored like a new layer of the other recipe."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from cache.tagged import LayerCache
from cache.tiled import Tiled
from kvant import SpecError, attend, parse
from kvant.codecs import Raw
from kvant.contracts import Snapshot
from kvant.recipes import LayerSpec
from kvant.retention import KeepAll, Window
from laws.cases import Case, append_chunk, iterate_cases, make_layer_of, pairwise, thin_cases

Law = Callable[[Case, int], None]
LENGTHS = (63, 64, 65, 192, 207, 261)  # around a page boundary, one slack after it, and between


def assert_same_bits(a: Snapshot, b: Snapshot) -> None:
    assert a.numbers == b.numbers
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        assert torch.equal(a.tensors[name], b.tensors[name]), name


def assert_alike(case: Case, a: LayerCache, b: LayerCache) -> None:
    """Assert equal reads, attention and memory."""
    # pages evicted by a chunk are free, and so are unused ones of a capacity
    assert a.nbytes <= b.nbytes
    assert_same_stats(case, a, b)


def assert_same_stats(case: Case, a: LayerCache, b: LayerCache) -> None:
    """Assert equal stats but for reserved memory."""
    assert (a.length, a.held, a.nbytes_used) == (b.length, b.held, b.nbytes_used)
    assert torch.equal(a.positions(), b.positions())
    for first, second in zip(a.read(), b.read(), strict=True):
        assert torch.equal(first, second)
    q = case.queries(a.length, 1)
    assert torch.equal(attend(q, a.view()), attend(q, b.view()))


def recode_layer(state: LayerCache, spec: LayerSpec) -> None:
    state.recode(spec)


def append_tokens(case: Case, *states: LayerCache, count: int = 1) -> None:
    """Append the same new tokens to each, one by one."""
    for _ in range(count):
        keys, values = case.rows(5000 + states[0].length, 1)
        for state in states:
            append_chunk(case, state, keys, values)


def make_raw_case(case: Case, retention: str = "") -> Case:
    return replace(case, keys="raw", values="raw", retention=retention)


def rebuild_from_reads(case: Case, state: LayerCache, spec: LayerSpec) -> LayerCache:
    """Return a new layer with the rows that the layer reads."""
    fresh = LayerCache(spec, state.tiles)
    fresh.append(*state.read(), start=case.start, prefill="stored")
    return fresh


def make_other_recipe(case: Case) -> LayerSpec:
    """Return a recipe with codecs, page and tail that no case has; keys have a frame."""
    turbo, affine = (parse(text, 1).layers[0] for text in ("turbo3,seed=5", "affine4,group=16"))
    assert isinstance(turbo, LayerSpec) and isinstance(affine, LayerSpec)
    return replace(affine, keys=turbo.keys, tail=7, page=128, retention=case.spec.retention)


def raw_rows_become_what_a_new_layer_holds(case: Case, length: int) -> None:
    """To the byte, and for all later operations."""
    state, fresh = make_layer_of(make_raw_case(case), length), make_layer_of(case, length)
    state.tiles = fresh.tiles
    recode_layer(state, case.spec)
    assert_same_bits(state.snapshot(), fresh.snapshot())
    assert_alike(case, state, fresh)
    append_tokens(case, state, fresh, count=20)
    assert_same_bits(state.snapshot(), fresh.snapshot())
    state.rewind(length + 4)
    fresh.rewind(length + 4)
    assert_alike(case, state, fresh)


def rows_of_a_window_become_a_shorter_one(case: Case, length: int) -> None:
    """Also where its first page has lost its oldest rows, which no query can see."""
    if "window" not in case.retention:
        return
    state, fresh = (
        make_layer_of(make_raw_case(case, "window=210,sinks=4"), length),
        make_layer_of(case, length),
    )
    recode_layer(state, case.spec)
    assert_alike(case, state, fresh)
    for num_rewound in (1, 9):
        new_length = state.length - num_rewound
        if state.reachable(new_length) == new_length:
            state.rewind(new_length)
            fresh.rewind(new_length)
            assert_alike(case, state, fresh)
    for _ in range(70):
        append_tokens(case, state, fresh)
    assert_alike(case, state, fresh)


def other_formats_encode_the_decoded_rows(case: Case, length: int) -> None:
    state = make_layer_of(case, length)
    if state.held < length:
        return
    fresh = rebuild_from_reads(case, state, make_other_recipe(case))
    recode_layer(state, make_other_recipe(case))
    assert_alike(case, state, fresh)
    append_tokens(case, state, fresh, count=140)
    assert_alike(case, state, fresh)


def raw_again_reads_the_same(case: Case, length: int) -> None:
    state = make_layer_of(case, length)
    before = state.read()
    recode_layer(state, replace(case.spec, keys=Raw(), values=Raw()))
    for old_rows, now in zip(before, state.read(), strict=True):
        assert torch.equal(old_rows, now)


def unchanged_rows_are_not_encoded_again(case: Case, length: int) -> None:
    """Another step changes memory only: all stored bytes stay."""
    state = make_layer_of(case, length)
    before = state.snapshot()
    recode_layer(state, case.spec)
    assert_same_bits(state.snapshot(), before)
    recode_layer(state, replace(case.spec, step=7))
    assert_same_bits(state.snapshot(), before)
    assert state.stats.sealed_pages == make_layer_of(case, length).stats.sealed_pages


def evicted_rows_are_refused(case: Case, length: int) -> None:
    state = make_layer_of(case, length)
    before, spec = state.snapshot(), state.spec
    retained, sinks = state.held, spec.retention.sinks
    refused: list[KeepAll | Window] = [KeepAll(), Window(length)] if retained < length else []
    if retained < length:
        refused.append(Window(1, sinks=sinks + 1))
    for retention in refused:
        with pytest.raises(SpecError, match=f"of {length} tokens|sinks="):
            state.recode(replace(make_other_recipe(case), retention=retention))
        assert state.spec == spec
        assert_same_bits(state.snapshot(), before)


def forks_are_independent(case: Case, length: int) -> None:
    state = make_layer_of(case, length)
    fork_, before = state.fork(), state.snapshot()
    recode_layer(state, make_other_recipe(case))
    assert_same_bits(fork_.snapshot(), before)
    fork = state.fork()
    assert_alike(case, state, fork)
    restored = LayerCache(state.spec, state.tiles)
    restored.restore(state.snapshot())
    assert_same_stats(case, state, restored)
    append_tokens(case, state, fork, restored, count=3)
    assert_same_bits(state.snapshot(), fork.snapshot())
    assert_same_bits(state.snapshot(), restored.snapshot())


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        raw_rows_become_what_a_new_layer_holds,
        rows_of_a_window_become_a_shorter_one,
        other_formats_encode_the_decoded_rows,
        raw_again_reads_the_same,
        unchanged_rows_are_not_encoded_again,
        evicted_rows_are_refused,
        forks_are_independent,
    )
}


def _case_id(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value))


def spread_lengths(cases: Iterable[Case]) -> Iterator[tuple[Case, int]]:
    """Give each case one length; rows pruned per head have separate tests."""
    dice = random.Random(0)
    return ((case, dice.choice(LENGTHS)) for case in cases if "prune" not in case.retention)


@pytest.mark.parametrize(
    ("law", "case_at"), thin_cases(LAWS, spread_lengths(pairwise())), ids=_case_id
)
def test_law(law: str, case_at: tuple[Case, int]) -> None:
    LAWS[law](*case_at)


@pytest.mark.laws
@pytest.mark.parametrize("part", range(16))
def test_laws_everywhere(part: int) -> None:
    """Two laws per case: all of them would take longer than all other laws together."""
    dice = random.Random(part)
    for case, length in islice(spread_lengths(iterate_cases()), part, None, 16):
        for law in dice.sample(sorted(LAWS), 2):
            LAWS[law](case, length)


def test_tiles_stay() -> None:
    state = LayerCache(
        make_other_recipe(Case("raw", "raw", "", "step=1", 1, torch.float32)), Tiled()
    )
    case = Case("affine4", "affine4", "", "step=1", 1, torch.float32)
    append_chunk(case, state, *case.rows(0, 300))
    fresh = rebuild_from_reads(case, state, case.spec)
    recode_layer(state, case.spec)
    assert_alike(case, state, fresh)
    assert state.tiles is not None
