"""`kvant.probe`: what a spec does to a model, layer by layer, and what would do less.

A text of a thousand tokens, in seconds: enough to see a format that breaks a model, and no
measurement of its quality; that is `kvant eval`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvant.configurations import layer_shapes, max_context
from kvant.errors import SpecError
from kvant.hf import continuing, host_model
from kvant.probing.choice import promoted, smallest
from kvant.probing.predictions import Damage, damage, unbounded
from kvant.probing.screen import Screen
from kvant.probing.text import MAX_KL, Trial, trial
from kvant.recipes import AnySpec
from kvant.sizes import parse_size

AUTO = "auto"


@dataclass(frozen=True)
class Probe:
    """The finding."""

    spec: AnySpec
    damage: Damage
    layers: tuple[float, ...]  # mean divergence where one layer alone is stored so, nats
    max_kl: float  # what is tolerated in the mean
    recommended: AnySpec
    why: str

    @property
    def harmless(self) -> bool:
        return self.damage.mean_kl <= self.max_kl

    def __str__(self) -> str:
        worst = max(range(len(self.layers)), key=self.layers.__getitem__)
        return (
            f"{_word(self.spec)}: {self.damage.mean_kl:.2g} nats in the mean, "
            f"{self.damage.quantile(0.999):.2g} in 1 of 1000 positions, the likeliest token stays "
            f"in {self.damage.top1:.1%}; at most {self.max_kl:.2g} in the mean is tolerated\n"
            f"layer {worst} alone: {self.layers[worst]:.2g} nats, the most of all\n"
            f"recommended: {_word(self.recommended)} ({self.why})"
        )


def probe(
    model: nn.Module,
    tokenizer: Any,
    spec: AnySpec,
    *,
    text: str | None = None,
    max_kl: float = MAX_KL,
) -> Probe:
    """What the formats of a spec do to a model, on a text of yours or one of the standard library.

    What a window lets go is not counted: a query sees less by it whatever the format.
    """
    model = continuing(host_model(model))
    tried = trial(model, tokenizer, text, max_kl)
    asked = resolved(model, spec, tried)
    formats, screen = unbounded(model, asked), Screen.of(model, tried.ids)
    found = damage(model, [tried.ids], formats)
    recommended, why = asked, "it does little enough"
    if found.mean_kl > tried.max_kl:
        recommended, why = _better(model, asked, tried)
    return Probe(asked, found, screen.by_layer(formats), tried.max_kl, recommended, why)


def resolved(model: PreTrainedModel, spec: AnySpec, tried: Trial) -> AnySpec:
    """The spec, or what `auto` and `auto:SIZE` stand for with this model."""
    if not is_auto(spec):
        return spec
    size = auto_size(str(spec))
    screen = Screen.of(model, tried.ids)

    def judge(one: str) -> bool:
        return screen.damage(one).mean_kl <= tried.max_kl and _does_little(model, one, tried)

    context = max_context(model.config) or 8192
    return smallest(judge, layer_shapes(model), context, size)


def auto_size(spec: str) -> str | None:
    """What `auto:SIZE` may take, if it says so."""
    _, colon, size = spec.partition(":")
    if colon and not size:
        raise SpecError(f"{spec!r}: a size is needed behind the colon; nearest: auto:1GiB")
    if not colon:
        return None
    parse_size(size)
    return size


def is_auto(spec: object) -> bool:
    return isinstance(spec, str) and spec.partition(":")[0].strip() == AUTO


def _better(model: PreTrainedModel, spec: AnySpec, tried: Trial) -> tuple[AnySpec, str]:
    if not isinstance(spec, str):
        return "raw", "recipes of your own are not changed"
    return next((one, why) for one, why in promoted(spec) if _does_little(model, one, tried))


def _does_little(model: PreTrainedModel, spec: str, tried: Trial) -> bool:
    return damage(model, [tried.ids], unbounded(model, spec)).mean_kl <= tried.max_kl


def _word(spec: AnySpec) -> str:
    return spec if isinstance(spec, str) else "these recipes"
