"""Run one forward of a transformers model: tokens at their positions, over a cache."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf.model import get_cache_argument, get_forward_arguments


class TokenForward:
    """A model called by the argument names of its forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._cache_argument = get_cache_argument(model)
        names = get_forward_arguments(model)
        self.takes_positions = "position_ids" in names
        self._takes_logits_to_keep = "logits_to_keep" in names

    def __call__(self, ids: Tensor, positions: Tensor, cache: Any, num_logits: int = 1) -> Tensor:
        """Return logits [sequences, >= num_logits, vocabulary] of `ids` [sequences, tokens].

        With `cache=None` nothing is cached.
        """
        arguments: dict[str, Any] = {self._cache_argument: cache, "use_cache": cache is not None}
        if self.takes_positions:
            arguments["position_ids"] = positions
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = num_logits
        return cast(Tensor, self.model(input_ids=ids, **arguments).logits)
