"""Test that a transformers mask equal to the rule does not select a slower backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvant
from hf.zoo import build
from kvant.contracts import Mask, View
from kvant.hf.masks import resolve_mask

COUNT, LENGTH = 5, 90


def make_view(text: str) -> View:
    state = kvant.Cache(1, text)[0]
    keys, values = torch.randn(2, 2, 1, LENGTH, 16)
    state.append(keys[:, :, :-COUNT], values[:, :, :-COUNT])
    view: View = state.append(keys[:, :, -COUNT:], values[:, :, -COUNT:])
    return view


def make_mask(
    padding: tuple[int, int] = (0, 0), window: int = LENGTH, columns: int = LENGTH
) -> Tensor:
    q = torch.arange(LENGTH - COUNT, LENGTH)[:, None]
    k = torch.arange(LENGTH - columns, LENGTH)
    start = torch.tensor(padding).view(2, 1, 1, 1)
    return (k <= q) & (q - k < window) & (k >= start)


def explain_mask(text: str, mask: Tensor, narrow: bool = False) -> tuple[object, list[int]]:
    resolved = resolve_mask(make_view(text), COUNT, mask, True, narrow)
    assert resolved is not None
    return resolved[1], resolved[0].page_table.first_visible.tolist()


def test_masks_with_a_rule_are_recognized() -> None:
    assert explain_mask("raw", make_mask()) == (Mask(), [0, 0])
    assert explain_mask("raw", make_mask((0, 7))) == (Mask(), [0, 7])
    window = Mask(window=20)
    assert explain_mask("raw,window=20,sinks=0", make_mask(window=20)) == (window, [0, 0])
    assert explain_mask("raw,window=20,sinks=0", make_mask(window=20, columns=30)) == (
        window,
        [0, 0],
    )
    assert explain_mask("raw,window=20,sinks=0", make_mask(), narrow=True) == (window, [0, 0])


@pytest.mark.parametrize("place", [(0, 0, 0, 3), (1, 0, -1, -1), (0, 0, 2, 80)])
def test_other_masks_are_not_recognized(place: tuple[int, ...]) -> None:
    mask = make_mask()
    mask[place] = False
    assert explain_mask("raw", mask)[0] is mask
    assert isinstance(explain_mask("raw", make_mask(window=20))[0], Tensor)
    assert isinstance(explain_mask("raw", make_mask(columns=30))[0], Tensor)
    assert isinstance(explain_mask("raw", make_mask().float())[0], Tensor)


def test_modified_mask_is_compared_again() -> None:
    view, mask = make_view("raw"), make_mask()
    assert resolve_mask(view, COUNT, mask, True, False) == (view, Mask())
    mask[0, 0, 0, 3] = False
    resolved = resolve_mask(view, COUNT, mask, True, False)
    assert resolved is not None and resolved[1] is mask


def test_chunks_of_an_unmodified_model_use_one_backend() -> None:
    model = build("llama")
    cache = kvant.cache_for(model, "affine8")
    with torch.no_grad():
        for count in (100, 9, 1, 40):
            model(torch.randint(3, 128, (1, count)), past_key_values=cache)
    assert len(cache.stats()["attended"]) == 1
