"""A mask of the host's that says what the rule says is no reason for a slower backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvant
from hf.zoo import build
from kvant.contracts import Mask, View
from kvant.hf.masks import resolve_mask

COUNT, LENGTH = 5, 90


def view_of(text: str) -> View:
    state = kvant.Cache(1, text)[0]
    keys, values = torch.randn(2, 2, 1, LENGTH, 16)
    state.append(keys[:, :, :-COUNT], values[:, :, :-COUNT])
    view: View = state.append(keys[:, :, -COUNT:], values[:, :, -COUNT:])
    return view


def mask_of(
    padding: tuple[int, int] = (0, 0), window: int = LENGTH, columns: int = LENGTH
) -> Tensor:
    q = torch.arange(LENGTH - COUNT, LENGTH)[:, None]
    k = torch.arange(LENGTH - columns, LENGTH)
    start = torch.tensor(padding).view(2, 1, 1, 1)
    return (k <= q) & (q - k < window) & (k >= start)


def told(text: str, mask: Tensor, narrow: bool = False) -> tuple[object, list[int]]:
    seen = resolve_mask(view_of(text), COUNT, mask, True, narrow)
    assert seen is not None
    return seen[1], seen[0].page_table.first_visible.tolist()


def test_masks_that_are_rules() -> None:
    assert told("raw", mask_of()) == (Mask(), [0, 0])
    assert told("raw", mask_of((0, 7))) == (Mask(), [0, 7])
    window = Mask(window=20)
    assert told("raw,window=20,sinks=0", mask_of(window=20)) == (window, [0, 0])
    assert told("raw,window=20,sinks=0", mask_of(window=20, columns=30)) == (window, [0, 0])
    assert told("raw,window=20,sinks=0", mask_of(), narrow=True) == (window, [0, 0])


@pytest.mark.parametrize("place", [(0, 0, 0, 3), (1, 0, -1, -1), (0, 0, 2, 80)])
def test_masks_that_are_not(place: tuple[int, ...]) -> None:
    mask = mask_of()
    mask[place] = False
    assert told("raw", mask)[0] is mask
    assert isinstance(told("raw", mask_of(window=20))[0], Tensor)
    assert isinstance(told("raw", mask_of(columns=30))[0], Tensor)
    assert isinstance(told("raw", mask_of().float())[0], Tensor)


def test_a_mask_that_is_written_to_is_compared_again() -> None:
    view, mask = view_of("raw"), mask_of()
    assert resolve_mask(view, COUNT, mask, True, False) == (view, Mask())
    mask[0, 0, 0, 3] = False
    seen = resolve_mask(view, COUNT, mask, True, False)
    assert seen is not None and seen[1] is mask


def test_chunks_of_a_model_as_it_is_are_read_by_one_backend() -> None:
    model = build("llama")
    cache = kvant.cache_for(model, "affine8")
    with torch.no_grad():
        for count in (100, 9, 1, 40):
            model(torch.randint(3, 128, (1, count)), past_key_values=cache)
    assert len(cache.stats()["attended"]) == 1
