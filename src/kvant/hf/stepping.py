"""A cache as a model sees it in a forward of one token that runs on tensors alone.

Where a forward is captured, every number that it asks for stays what it was. So nothing here tells
how many tokens there are but in a tensor: whoever needs it as a number cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from kvant.attention import Step
from kvant.contracts import Mask, View
from kvant.errors import CacheError, UnsupportedView
from kvant.hf.context import Notes
from kvant.hf.detect import narrows
from kvant.hf.handles import pair
from kvant.hf.layers import AttentionLayer
from kvant.hf.reading import Question, Reading, SideName


@dataclass(eq=False, kw_only=True)
class StepReading(Reading):
    """The rows of one layer, behind which those of a token are put when attention asks."""

    step: Step
    new: tuple[Tensor, Tensor]

    def over(self, q: Tensor, view: View, rule: Mask | Tensor | None, question: Question) -> Tensor:
        if isinstance(rule, Tensor) or view is not self.view:
            raise UnsupportedView("a mask that is a tensor")
        step = self.step if rule is None else replace(self.step, mask=rule)
        return step(
            q,
            *self.new,
            scale=question.scale,
            softcap=question.softcap,
            sink_logits=question.sink_logits,
        )

    def rows(self, side: SideName, why: str) -> Tensor:
        raise UnsupportedView(f"{why} needs dense rows")


class StepLayer(CacheLayerMixin):
    """One attention layer; `step` is where its rows go."""

    def __init__(self, layer: AttentionLayer, step: Step) -> None:
        self.step = step
        self.is_sliding = layer.is_sliding
        self.narrow = narrows(layer.described, layer.recipe)
        self.window, self.packs = layer.described.window, layer.described.packs
        super().__init__()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Everything is there already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        source = StepReading(
            self.step.pages,
            1,
            self.get_mask_sizes(1)[0],
            key_states.dtype,
            Notes(),
            self.narrow,
            packs=self.packs,
            step=self.step,
            new=(key_states, value_states),
        )
        return pair(source, key_states.dtype, key_states.device)

    def get_seq_length(self) -> Tensor:
        """Columns before this token."""
        return self.step.place.columns - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As many columns as there may be: a mask that is made all the same is refused."""
        most = self.step.place.tokens
        return most if self.window is None else min(most, self.window), 0

    def get_max_length(self) -> int:
        return -1

    def reset(self, *args: Any) -> NoReturn:
        raise CacheError("a forward that is captured may not change its cache but by a token")

    crop = reorder_cache = batch_select_indices = batch_repeat_interleave = reset


class StepCache(TransformersCache):
    """All layers of a cache; those that remember nothing stay what they are."""

    def __init__(self, layers: Sequence[Any], steps: Sequence[Step]) -> None:
        given = iter(steps)
        made = [StepLayer(x, next(given)) if isinstance(x, AttentionLayer) else x for x in layers]
        super().__init__(layers=made)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        first = next(layer for layer in self.layers if isinstance(layer, StepLayer))
        return first.get_seq_length()
