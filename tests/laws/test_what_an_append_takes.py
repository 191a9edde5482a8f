"""Test that the allocation of an append is forecast to the byte, without side effects."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from cache.tagged import LayerCache
from kvant import Cache, CapacityError, LayerSpec
from kvant.recipes import CacheSpec, RecurrentSpec
from laws.test_random_specs import DIM, paddings, recipes

# tokens to append, tokens to rewind, and whether a forward fails first
steps = st.lists(
    st.tuples(st.integers(0, 150), st.integers(0, 40), st.booleans()), min_size=1, max_size=6
)


@given(spec=recipes, script=steps, start=paddings)
@settings(max_examples=60)
def test_append_allocates_the_forecast(
    spec: LayerSpec, script: list[tuple[int, int, bool]], start: list[int]
) -> None:
    """Before a commit frees evicted pages, and from the first rows on."""
    cache = Cache(spec=CacheSpec((spec, spec)))
    for count, num_rewound, dies in script:
        rows = torch.zeros(len(start), 2, count, DIM)
        options = {"start": None if cache.length else start}
        if spec.capacity is not None and cache.length + count > spec.capacity:
            with pytest.raises(CapacityError):
                cache[0].nbytes_after_append(rows, rows, **options)
            break
        if dies:
            cache[0].append(rows, rows, **options)
            cache.rollback()
        for state in (cache[0], cache[1]):
            before = state.nbytes, state.length
            forecast = state.nbytes_after_append(rows, rows, **options)
            assert (state.nbytes, state.length) == before
            state.append(rows, rows, **options)
            if state is cache[0]:
                assert state.nbytes == forecast
            else:
                assert cache.is_complete and state.nbytes <= forecast
        cache.rewind(cache.reachable(max(0, cache.length - num_rewound)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_recurrent_state_allocates_the_forecast(dtype: torch.dtype) -> None:
    state = LayerCache(RecurrentSpec())
    for count in (3, 1):
        options = {"conv": torch.zeros(1, 8, 3, dtype=dtype)}
        forecast = state.nbytes_after_append(count, options)
        state.append(count, options)
        assert state.nbytes == forecast
        state.checkpoint()
    with pytest.raises(ValueError, match="for a layer of"):
        state.nbytes_after_append(1, {"conv": torch.zeros(1, 8, 4)})


def test_refused_append_is_forecast_as_refused() -> None:
    cache = Cache(1, "affine8,capacity=100")
    rows = torch.zeros(1, 2, 60, 16)
    cache[0].append(rows, rows)
    for wrong, error in ((rows[:, :1], ValueError), (rows, CapacityError)):
        with pytest.raises(error) as forecast_error:
            cache[0].nbytes_after_append(wrong, wrong)
        with pytest.raises(error) as actual_error:
            cache[0].append(wrong, wrong)
        assert str(forecast_error.value) == str(actual_error.value)
    with pytest.raises(ValueError, match="prefill"):
        cache[0].nbytes_after_append(rows, rows, prefill="both")
