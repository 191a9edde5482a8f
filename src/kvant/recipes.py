"""How a cache is described: frozen recipes, one a layer. Also the header of a file.

A recipe holds what was asked for; what follows from it is a property. It allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvant.contracts import Codec, Mask, Retention

Prefill = Literal["dense", "stored"]  # are a prompt chunk's own rows seen dense, or by the rule?


@dataclass(frozen=True)
class LayerSpec:
    """The recipe of one attention layer."""

    keys: Codec
    values: Codec
    retention: Retention
    page: int = 64
    tail: int | None = None  # None: as the codecs ask
    slack: int = 16
    start: int = 0  # everything is dense until this many tokens
    prefill: Prefill = "dense"
    step: int = 256
    capacity: int | None = None
    dtype: torch.dtype | None = None  # of dense rows; None: as they come
    chunk: int | None = None
    value_dim: int | None = None  # values are the first channels of the keys (MLA)

    @property
    def seals(self) -> bool:
        """Raw layers stay open for ever: sealed and dense would be the same bytes."""
        return not (self.keys.exact and self.values.exact)

    @property
    def resolved_tail(self) -> int:
        return max(self.keys.tail, self.values.tail) if self.tail is None else self.tail

    @property
    def mask(self) -> Mask:
        return Mask(True, self.retention.window, self.retention.sinks, self.chunk)


@dataclass(frozen=True)
class RecurrentSpec:
    """The recipe of a layer that remembers fixed-shape tensors."""

    max_checkpoints: int = 16


@dataclass(frozen=True)
class GroupSpec:
    """The recipe of a layer with several memories, by name (attention beside a recurrence)."""

    parts: tuple[tuple[str, LayerSpec | RecurrentSpec], ...]


@dataclass(frozen=True)
class SharedSpec:
    """A layer that reads the rows of an earlier one and has none of its own."""

    layer: int


Recipe = LayerSpec | RecurrentSpec | GroupSpec | SharedSpec


@dataclass(frozen=True)
class CacheSpec:
    """One recipe a layer."""

    layers: tuple[Recipe, ...]
