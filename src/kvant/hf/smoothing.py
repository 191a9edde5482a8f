"""Channel scales fitted to a model of the host's, from one forward.

A few channels of the keys of many models are far larger than the others, the same ones in every
row, and a group or a row that holds one loses the rest. With s = sqrt(rms of queries / rms of
keys), s k and q / s are equally large in every channel and the scores stay what they are. How
large channels are follows from the weights: tokens that mean nothing tell it as well as a text.

Knows no format: what passes the door of a frame is counted there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.codecs import Affine, Raw
from kvant.configurations import max_context
from kvant.errors import SpecError
from kvant.frames import Diagonal, fitted, waits
from kvant.hf.cache import HostCache
from kvant.hf.detect import host_layers, recipes
from kvant.recipes import CacheSpec, LayerSpec, attention_in
from kvant.retention import All

TOKENS = 256
NEVER = 2**31 - 1  # tokens: nothing is sealed
LEAST = 1e-3  # of the largest channel: smaller ones are taken to be as large
DIGITS = 4

# Of the weights that a model had when it was first asked; with others, scores stay right as well.
_known: WeakKeyDictionary[PreTrainedModel, list[Diagonal]] = WeakKeyDictionary()


@dataclass(eq=False)
class Watched:
    """A = 1, and the squares of all that passed, summed up by channel."""

    trivial: ClassVar[bool] = False
    keys: Tensor | None = None  # [H, D]
    asked: Tensor | None = None  # [H * group, D]

    def rows(self, x: Tensor) -> Tensor:
        self.keys = _summed(self.keys, x)
        return x

    def queries(self, q: Tensor) -> Tensor:
        self.asked = _summed(self.asked, q)
        return q.float()

    def outputs(self, x: Tensor) -> Tensor:
        return x

    def scale(self) -> Diagonal:
        assert self.keys is not None
        heads, dim = self.keys.shape
        keys = _large(self.keys)
        # Of a model that computes its scores itself no query is seen: small where keys are large.
        asked = 1 / keys if self.asked is None else self.asked.view(heads, -1, dim).mean(1)
        scale = (_large(asked) / keys) ** 0.25  # of squares
        even = scale / scale.log().mean(-1, keepdim=True).exp()
        if not even.isfinite().all():
            raise SpecError("smooth: the keys or queries of this model are no numbers")
        return Diagonal(tuple(tuple(round(v, DIGITS) for v in head) for head in even.tolist()))


def smooth(model: PreTrainedModel, spec: CacheSpec) -> CacheSpec:
    """The spec with a scale of this model wherever one is to be fitted."""
    if not any(waits(layer.keys.frame) for layer in attention_in(*spec.layers)):
        return spec
    if model not in _known:
        _known[model] = _scales(model)
    scales = iter(_known[model])
    return spec.changed(lambda layer: _with_scale(layer, next(scales)))


def _with_scale(layer: LayerSpec, scale: Diagonal) -> LayerSpec:
    if not waits(layer.keys.frame):
        return layer
    codec: Any = layer.keys
    return replace(layer, keys=replace(codec, frame=fitted(codec.frame, scale)))


@torch.no_grad()
def _scales(model: PreTrainedModel) -> list[Diagonal]:
    """One for each layer that attends."""
    if model.config.is_encoder_decoder:
        raise SpecError("smooth is fitted to models that only decode; leave it out")
    layers = host_layers(model)
    watched = [Watched() for layer in layers if layer.attends]
    dense = (LayerSpec(Affine(8, frame=w), Raw(), All(), dense_until=NEVER) for w in watched)
    cache = HostCache(layers, recipes(layers, CacheSpec(tuple(dense))))
    config = model.config.get_text_config(decoder=True)
    count = min(TOKENS, max_context(config) or TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, count), generator=generator, device="cpu")
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()  # what is dropped at random is none of the model's
        ids = ids.to(model.device)
        for part in (ids[:, :1], ids[:, 1:]):
            model(part, past_key_values=cache)  # behind a first token, attention asks the cache
    finally:
        for module, training in modes.items():
            module.training = training
    return [one.scale() for one in watched]


def _summed(total: Tensor | None, x: Tensor) -> Tensor:
    more = x.double().square().sum((0, 2))
    return more if total is None else total + more


def _large(squares: Tensor) -> Tensor:
    most = float(squares.max())
    return squares.clamp(min=LEAST**2 * most) if most else torch.ones_like(squares)
