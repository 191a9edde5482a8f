"""Channel scales fitted to a model of the host's, from one forward.

A few channels of the keys of many models are far larger than the others, the same ones in every
row, and a group or a row that holds one loses the rest. With s = sqrt(rms of queries / rms of
keys), s k and q / s are equally large in every channel and the scores stay what they are. Values
are made equally large in every channel, s = 1 / rms, and the scale leaves with the outputs. How
large channels are follows from the weights: tokens that mean nothing tell it as well as a text.

Knows no format: what passes the door of a frame is counted there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.codecs import Raw
from kvant.codecs.frames import Diagonal, Identity, fitted, waits
from kvant.contracts import Codec, Frame
from kvant.errors import SpecError
from kvant.hf.attention import switched
from kvant.hf.cache import HostCache
from kvant.hf.detect import crosses, host_layers, recipes
from kvant.hf.inside import cache_name, continuing
from kvant.models import max_context
from kvant.recipes import CacheSpec, LayerSpec, attention_in
from kvant.retention import All

TOKENS = 256
LEAST = 1e-3  # of the largest channel: smaller ones are taken to be as large
DIGITS = 4

# Of the weights that a model had when it was first asked; with others, scores stay right as well.
_known: WeakKeyDictionary[PreTrainedModel, list[Scales]] = WeakKeyDictionary()


@dataclass(eq=False)
class Watched:
    """A = 1, and the squares of all that passed, summed up by channel."""

    trivial: ClassVar[bool] = False
    stored: Tensor | None = None  # [H, D]
    asked: Tensor | None = None  # [H * group, D]

    def rows(self, x: Tensor) -> Tensor:
        self.stored = _summed(self.stored, x)
        return x

    def queries(self, q: Tensor) -> Tensor:
        self.asked = _summed(self.asked, q)
        return q.float()

    def outputs(self, x: Tensor) -> Tensor:
        return x

    def scale(self) -> Frame:
        if self.stored is None:
            return Identity()  # values that lie inside the keys
        heads, dim = self.stored.shape
        stored = _large(self.stored)
        # Nobody asks values; and of a model that computes its scores itself no query is seen.
        asked = 1 / stored if self.asked is None else self.asked.view(heads, -1, dim).mean(1)
        scale = (_large(asked) / stored) ** 0.25  # of squares
        even = scale / scale.log().mean(-1, keepdim=True).exp()
        if not even.isfinite().all():
            raise SpecError("smooth: keys, values or queries of this model are no numbers")
        return Diagonal(tuple(tuple(_rounded(v) for v in head) for head in even.tolist()))


@dataclass(frozen=True)
class Scales:
    """The frames that one layer's keys and values get."""

    keys: Frame
    values: Frame


@dataclass(frozen=True)
class Door(Raw):
    """Rows of any width that stay as they are, behind a frame."""

    frame: Frame = field(default_factory=Identity)  # type: ignore[misc]


def smooth(model: PreTrainedModel, spec: CacheSpec) -> CacheSpec:
    """The spec with a scale of this model wherever one is to be fitted."""
    codecs = [codec for layer in attention_in(*spec.layers) for codec in layer.sides.values()]
    if not any(waits(codec.frame) for codec in codecs):
        return spec
    if model not in _known:
        _known[model] = _scales(continuing(model))
    scales = iter(_known[model])
    return spec.changed(lambda layer: _with_scales(layer, next(scales)))


def _with_scales(layer: LayerSpec, scales: Scales) -> LayerSpec:
    return replace(
        layer,
        keys=_with_scale(layer.keys, scales.keys),
        values=_with_scale(layer.values, scales.values),
    )


def _with_scale(codec: Any, scale: Frame) -> Codec:
    if not waits(codec.frame):
        return codec  # type: ignore[no-any-return]
    return replace(codec, frame=fitted(codec.frame, scale))  # type: ignore[no-any-return]


@torch.no_grad()
def _scales(model: PreTrainedModel) -> list[Scales]:
    """One for each layer that attends."""
    if crosses(model):
        raise SpecError("smooth is fitted to models that only decode; leave it out")
    layers = host_layers(model)
    watched = [(Watched(), Watched()) for layer in layers if layer.attends]
    doors = (LayerSpec(Door(keys), Door(values), All()) for keys, values in watched)
    cache = HostCache(layers, recipes(layers, CacheSpec(tuple(doors))))
    config = model.config.get_text_config(decoder=True)
    count = min(TOKENS, max_context(config) or TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, count), generator=generator, device="cpu")
    modes = {module: module.training for module in model.modules()}
    given = {cache_name(model): cache}
    try:
        model.eval()  # what is dropped at random is none of the model's
        ids = ids.to(model.device)
        with switched(model):  # queries are seen by ours
            model(ids[:, :1], **given)
            for keys, _ in watched:
                keys.asked = None  # a first token sees itself alone, whatever it asks
            model(ids[:, 1:], **given)  # behind it, attention asks the cache
    finally:
        for module, training in modes.items():
            module.training = training
    return [Scales(keys.scale(), values.scale()) for keys, values in watched]


def _summed(total: Tensor | None, x: Tensor) -> Tensor:
    more = x.double().square().sum((0, 2))
    return more if total is None else total + more


def _large(squares: Tensor) -> Tensor:
    most = float(squares.max())
    return squares.clamp(min=LEAST**2 * most) if most else torch.ones_like(squares)


def _rounded(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")
