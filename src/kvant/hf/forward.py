"""One forward of a model of transformers: tokens at their positions, over a cache."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf.inside import cache_name, forward_arguments


class TokenForward:
    """Calls a model by the argument names that its forward has."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._cache = cache_name(model)
        names = forward_arguments(model)
        self.takes_positions = "position_ids" in names
        self._keeps_logits = "logits_to_keep" in names

    def __call__(self, ids: Tensor, positions: Tensor, cache: Any, last: int = 1) -> Tensor:
        """Return logits [sequences, `last` or more, vocabulary] of `ids` [sequences, tokens].

        Without a cache nothing is kept.
        """
        arguments: dict[str, Any] = {self._cache: cache, "use_cache": cache is not None}
        if self.takes_positions:
            arguments["position_ids"] = positions
        if self._keeps_logits:
            arguments["logits_to_keep"] = last
        return cast(Tensor, self.model(input_ids=ids, **arguments).logits)
