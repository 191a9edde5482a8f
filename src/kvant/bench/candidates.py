"""Ways to continue one sequence, which a benchmark compares: no cache, a format, the host's cache.

All are asked the same: read these tokens, say the likeliest next. So what differs between two is
how they remember, and no loop or sampling of anybody's. Knows no clock.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from kvant.hf import cache_for

NONE = "none"  # no cache: everything is computed anew for every token


class Candidate(Protocol):
    """One sequence, at first empty."""

    @property
    def nbytes(self) -> int:
        """What the tokens are remembered in."""

    def feed(self, tokens: Sequence[int]) -> int:
        """Read `tokens` after those before; the likeliest next."""


Make = Callable[[], Candidate]


class Recomputed:
    """No memory but the tokens themselves."""

    nbytes = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._tokens: list[int] = []

    def feed(self, tokens: Sequence[int]) -> int:
        self._tokens += tokens
        return likeliest(self.model, self._tokens, use_cache=False)


class Remembered:
    """A cache that the model writes to and reads."""

    def __init__(self, model: PreTrainedModel, cache: Any, size: Callable[[Any], int]) -> None:
        self.model = model
        self.cache = cache
        self._size = size

    @property
    def nbytes(self) -> int:
        return self._size(self.cache)

    def feed(self, tokens: Sequence[int]) -> int:
        return likeliest(self.model, tokens, past_key_values=self.cache)


@torch.no_grad()
def likeliest(model: PreTrainedModel, tokens: Sequence[int], **how: Any) -> int:
    """The token that the model finds likeliest; logits of the others' places are not computed."""
    ids = torch.tensor([list(tokens)], device=model.device)
    return int(model(input_ids=ids, logits_to_keep=1, **how).logits[0, -1].argmax())


def dynamic(model: PreTrainedModel) -> Make:
    """The host's own cache."""
    return lambda: Remembered(model, DynamicCache(config=model.config), _dynamic_nbytes)


def ours(model: PreTrainedModel, names: Sequence[str]) -> dict[str, Make]:
    """Formats of the spec language, and "none"; one that the model cannot have is refused now."""
    takes = inspect.signature(model.forward).parameters
    for name in ("past_key_values", "logits_to_keep"):
        if name not in takes:
            raise ValueError(f"{type(model).__name__} takes no {name}: it cannot be measured so")
    return {name: _make(model, name) for name in names}


def _make(model: PreTrainedModel, name: str) -> Make:
    if name == NONE:
        return lambda: Recomputed(model)
    cache_for(model, name)
    return lambda: Remembered(model, cache_for(model, name), _our_nbytes)


def _our_nbytes(cache: Any) -> int:
    return int(cache.states.nbytes)


def _dynamic_nbytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
