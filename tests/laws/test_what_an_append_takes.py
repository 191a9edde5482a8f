"""What an append will take is known before it is made, to the byte, and nothing happens for it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from cache.tagged import One
from kvant import Cache, CapacityError, LayerSpec
from kvant.recipes import CacheSpec, RecurrentSpec
from laws.test_random_specs import DIM, paddings, recipes

steps = st.lists(
    st.tuples(st.integers(0, 150), st.integers(0, 40), st.booleans()), min_size=1, max_size=6
)  # tokens to append, how far to go back, and does a forward die first?


@given(spec=recipes, script=steps, start=paddings)
@settings(max_examples=60)
def test_an_append_takes_what_was_foreseen(
    spec: LayerSpec, script: list[tuple[int, int, bool]], start: list[int]
) -> None:
    """Before a commit lets go what became superfluous, and from the first rows on."""
    cache = Cache(spec=CacheSpec((spec, spec)))
    for count, back, dies in script:
        rows = torch.zeros(len(start), 2, count, DIM)
        given = {"start": None if cache.length else start}
        if spec.capacity is not None and cache.length + count > spec.capacity:
            with pytest.raises(CapacityError):
                cache[0].nbytes_after_append(rows, rows, **given)
            break
        if dies:
            cache[0].append(rows, rows, **given)
            cache.rollback()
        for state in (cache[0], cache[1]):
            before = state.nbytes, state.length
            foreseen = state.nbytes_after_append(rows, rows, **given)
            assert (state.nbytes, state.length) == before
            state.append(rows, rows, **given)
            if state is cache[0]:
                assert state.nbytes == foreseen
            else:
                assert cache.is_complete and state.nbytes <= foreseen
        cache.rewind(cache.reachable(max(0, cache.length - back)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_state_takes_what_was_foreseen(dtype: torch.dtype) -> None:
    state = One(RecurrentSpec())
    for count in (3, 1):
        given = {"conv": torch.zeros(1, 8, 3, dtype=dtype)}
        foreseen = state.nbytes_after_append(count, given)
        state.append(count, given)
        assert state.nbytes == foreseen
        state.checkpoint()
    with pytest.raises(ValueError, match="for a layer of"):
        state.nbytes_after_append(1, {"conv": torch.zeros(1, 8, 4)})


def test_what_an_append_refuses_is_refused() -> None:
    cache = Cache(1, "affine8,capacity=100")
    rows = torch.zeros(1, 2, 60, 16)
    cache[0].append(rows, rows)
    for wrong, error in ((rows[:, :1], ValueError), (rows, CapacityError)):
        with pytest.raises(error) as foreseen:
            cache[0].nbytes_after_append(wrong, wrong)
        with pytest.raises(error) as done:
            cache[0].append(wrong, wrong)
        assert str(foreseen.value) == str(done.value)
    with pytest.raises(ValueError, match="prefill"):
        cache[0].nbytes_after_append(rows, rows, prefill="both")
