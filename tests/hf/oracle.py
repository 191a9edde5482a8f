"""The transformers cache, restricted to the rows that a query sees by the rule.

This is "What a query sees" in docs/architecture.md, written a second time: the dense rows of
transformers, with sealed pages replaced by their decoded rows. Attention is that of transformers,
so only rounding differs.
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
    """The expected rows; `given` are the rows appended to the cache under test, for all later
    tokens.

    These rows are sealed here instead of the oracle's own. Those differ by float32 noise, and if
    noise flips a code, the difference is a whole quantization step.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None,
        spec: CacheSpec,
        rows: Mapping[int, Sequence[Rows]],
        *,
        cross: bool = False,
    ) -> None:
        super().__init__(**({} if config is None else {"config": config}))
        self.cross = cross  # encoder rows: read from the layer at every step
        specs = {index: get_attention_spec(spec.layers[index]) for index in rows}
        self.recipes = {index: recipe for index, recipe in specs.items() if recipe is not None}
        self.seen = dict.fromkeys(self.recipes, 0)
        self.decoded = {
            index: decode_rows(recipe, *_join(rows[index]))
            for index, recipe in self.recipes.items()
        }

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Rows:
        rows = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx not in self.seen:  # not stored by kvant
            return rows
        count, before = key_states.shape[2], self.seen[layer_idx]
        length = self.seen[layer_idx] = before + count
        seam = count_sealed_rows(self.recipes[layer_idx], length)
        if self.cross:
            layer = self.layers[layer_idx]
            layer.keys, layer.values = self._seen(layer_idx, rows, seam)
            return rows
        # A chunk of a prompt sees its own rows dense.
        return self._seen(layer_idx, rows, seam if count == 1 else min(seam, before))

    def _seen(self, layer: int, rows: Rows, seam: int) -> Rows:
        """Return the rows that transformers returned, those before `dense_from` decoded."""
        first = self.seen[layer] - rows[0].shape[2]
        keys, values = (
            torch.cat([new[:, :, first:seam], old[:, :, max(0, seam - first) :]], 2)
            for new, old in zip(self.decoded[layer], rows, strict=True)
        )
        return keys, values


def count_sealed_rows(recipe: LayerSpec, length: int) -> int:
    """Return how many rows the newest token sees sealed.

    A page [s, s + page) is sealed for it if s + page <= length - tail.
    """
    assert recipe.tail is not None
    return max(0, length - recipe.tail) // recipe.page * recipe.page


def get_attention_spec(recipe: Recipe) -> LayerSpec | None:
    spec = dict(recipe.parts)["attention"] if isinstance(recipe, GroupSpec) else recipe
    return spec if isinstance(spec, LayerSpec) else None


def decode_rows(recipe: LayerSpec, keys: Tensor, values: Tensor) -> Rows:
    """Encode and decode all rows page by page; rows of incomplete pages are left out.

    Latents and their rotated channels are one stream, in the format of the keys.
    """
    if recipe.value_dim is None:
        return _round_trip(recipe.keys, keys, recipe.page), _round_trip(
            recipe.values, values, recipe.page
        )
    rows = _round_trip(recipe.keys, torch.cat([keys, values], -1), recipe.page)
    return rows[..., : keys.shape[-1]], rows[..., keys.shape[-1] :]


def _round_trip(codec: Codec, rows: Tensor, page: int) -> Tensor:
    pages = rows.shape[2] // page
    framed = codec.frame.transform_rows(rows[:, :, : pages * page]).unflatten(2, (pages, page))
    return codec.frame.restore_outputs(codec.open(codec.seal(framed))).flatten(2, 3)


def _join(rows: Sequence[Rows]) -> Rows:
    keys, values = zip(*rows, strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)
