"""A layer of the host's whose rows come with an image and not with every token, as in Mllama.

The host keeps them, dense. They belong to the text of the forward that brought them: they go when
that text goes, or when that forward died.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvant.hf.context import Context


class CrossLayer(DynamicLayer):
    """Rows that every token reads whole: no part of what the other layers commit together."""

    def __init__(self, context: Context, index: int) -> None:
        self.context = context
        self.index = index
        self._came: list[tuple[int, int]] = []  # how long the text was then, and how many rows
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        """The host asks for them in a forward that brings none."""
        self._keep(self.context.states.length)
        return self._keys

    @keys.setter
    def keys(self, rows: Tensor | None) -> None:
        self._keys = rows

    @property
    def values(self) -> Tensor | None:
        self._keep(self.context.states.length)
        return self._values

    @values.setter
    def values(self, rows: Tensor | None) -> None:
        self._values = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows: tuple[Tensor, Tensor] = super().update(key_states, value_states)
        self._came.append((self.context.states.length, key_states.shape[2]))
        return rows

    def crop(self, tokens_to_remove: int) -> None:
        """Tokens of the text go; an image goes with the last of those that it came with."""
        self._keep(max(0, self.context.states.length + tokens_to_remove))

    def reset(self) -> None:
        super().reset()
        self._came = []

    def _keep(self, length: int) -> None:
        """Only the rows that came with the first `length` tokens of the text."""
        # Behind the last layer of the text, the tokens of the forward are counted already.
        behind = self.index > max(self.context.states.layers, default=self.index)
        kept = [(at, count) for at, count in self._came if at < length + behind]
        if len(kept) < len(self._came):
            assert self._keys is not None and self._values is not None
            rows = sum(count for _, count in kept)
            self._keys, self._values = self._keys[:, :, :rows], self._values[:, :, :rows]
            self._came = kept
