"""The host's own cache, except that a query sees the rows that the rule lets it see.

"What a query sees" in docs/architecture.md, written down a second time: the host's dense rows, and
in place of those of pages that fell due what the codec makes of them. Attention over them is the
host's: so what is left between the two is rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from kvant.contracts import Codec
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe

Rows = tuple[Tensor, Tensor]  # keys and values, [B, H, T, D]


class Oracle(DynamicCache):
    """`given` are the rows that the cache under test was given, for all tokens to come.

    They are what is sealed here, not the rows of the oracle's own forward: those differ by float32
    noise, and where noise turns a code over, a whole step of the format would be compared.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None,
        spec: CacheSpec,
        given: Mapping[int, Sequence[Rows]],
        *,
        cross: bool = False,
    ) -> None:
        super().__init__(**({} if config is None else {"config": config}))
        self.cross = cross  # rows of an encoder: read again from the layer, step after step
        found = {index: attention_of(spec.layers[index]) for index in given}
        self.recipes = {index: recipe for index, recipe in found.items() if recipe is not None}
        self.seen = dict.fromkeys(self.recipes, 0)
        self.decoded = {
            index: decoded(recipe, *_joined(given[index])) for index, recipe in self.recipes.items()
        }

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Rows:
        rows = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx not in self.seen:  # not ours to store
            return rows
        count, before = key_states.shape[2], self.seen[layer_idx]
        length = self.seen[layer_idx] = before + count
        seam = sealed_rows(self.recipes[layer_idx], length)
        if self.cross:
            layer = self.layers[layer_idx]
            layer.keys, layer.values = self._seen(layer_idx, rows, seam)
            return rows
        # A chunk of a prompt sees its own rows dense.
        return self._seen(layer_idx, rows, seam if count == 1 else min(seam, before))

    def _seen(self, layer: int, rows: Rows, seam: int) -> Rows:
        """The rows that the host returned, those before the seam decoded."""
        first = self.seen[layer] - rows[0].shape[2]
        keys, values = (
            torch.cat([new[:, :, first:seam], old[:, :, max(0, seam - first) :]], 2)
            for new, old in zip(self.decoded[layer], rows, strict=True)
        )
        return keys, values


def sealed_rows(recipe: LayerSpec, length: int) -> int:
    """How many rows the newest of so many tokens sees sealed.

    A page [s, s + page) is due for it when s + page <= length - tail.
    """
    assert recipe.tail is not None
    return max(0, length - recipe.tail) // recipe.page * recipe.page


def attention_of(recipe: Recipe) -> LayerSpec | None:
    found = dict(recipe.parts)["attention"] if isinstance(recipe, GroupSpec) else recipe
    return found if isinstance(found, LayerSpec) else None


def decoded(recipe: LayerSpec, keys: Tensor, values: Tensor) -> Rows:
    """All rows after a trip through the format, page by page; those of no full page are left out.

    Latents and their rotated channels are one stream, in the format of the keys.
    """
    if recipe.value_dim is None:
        return _through(recipe.keys, keys, recipe.page), _through(
            recipe.values, values, recipe.page
        )
    rows = _through(recipe.keys, torch.cat([keys, values], -1), recipe.page)
    return rows[..., : keys.shape[-1]], rows[..., keys.shape[-1] :]


def _through(codec: Codec, rows: Tensor, page: int) -> Tensor:
    pages = rows.shape[2] // page
    framed = codec.frame.transform_rows(rows[:, :, : pages * page]).unflatten(2, (pages, page))
    return codec.frame.restore_outputs(codec.open(codec.seal(framed))).flatten(2, 3)


def _joined(rows: Sequence[Rows]) -> Rows:
    keys, values = zip(*rows, strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)
