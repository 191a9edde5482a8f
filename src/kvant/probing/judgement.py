"""Do specs leave a model what it is? What is measured on one trial, and read once for all of them.

Two things are asked: what the model predicts, and what it recalls. A format may hardly change the
first, and take away half of the second: few tokens of a text are far back and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel

from kvant.probing.predictions import Damage, damage, unbounded
from kvant.probing.recall import Recall
from kvant.probing.screen import Screen
from kvant.probing.text import Trial
from kvant.recipes import AnySpec


@dataclass(frozen=True)
class Judgement:
    """Of a model on a trial; windows and capacities are left out (see `unbounded`)."""

    model: PreTrainedModel
    tried: Trial

    @cached_property
    def screen(self) -> Screen:
        return Screen.of(self.model, self.tried.ids)

    @cached_property
    def recall(self) -> Recall:
        return Recall.of(self.model, self.tried.exams())

    def damage(self, spec: AnySpec) -> Damage:
        return damage(self.model, [self.tried.ids], unbounded(self.model, spec))

    def lost(self, spec: AnySpec) -> float:
        return self.recall.lost(unbounded(self.model, spec))

    def spares(self, spec: AnySpec) -> bool:
        """Does it do little enough? What costs least to find out is asked first."""
        tried = self.tried
        return (
            self.screen.damage(unbounded(self.model, spec)).mean_kl <= tried.max_kl
            and self.lost(spec) <= tried.max_lost
            and self.damage(spec).mean_kl <= tried.max_kl
        )
