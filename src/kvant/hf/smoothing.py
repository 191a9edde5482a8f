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
from kvant.codecs.frames import Diagonal, Identity, fill_smoothing, needs_fitting
from kvant.contracts import Codec, Frame
from kvant.errors import SpecError
from kvant.hf.attention import use_kvant_attention
from kvant.hf.cache import TransformersCache
from kvant.hf.model import get_cache_argument, get_text_model
from kvant.hf.model_layers import get_model_layers, has_cross_attention, make_cache_spec
from kvant.models import max_context
from kvant.recipes import CacheSpec, LayerSpec, iterate_attention
from kvant.retention import KeepAll

MAX_FIT_TOKENS = 256
MIN_RELATIVE_SCALE = 1e-3  # of the largest channel: smaller ones are taken to be as large
SCALE_DIGITS = 4

# Of the weights that a model had when it was first asked; with others, scores stay right as well.
_fitted_frames: WeakKeyDictionary[PreTrainedModel, list[SmoothFrames]] = WeakKeyDictionary()


@dataclass(eq=False)
class ObservedFrame:
    """A = 1, and the squares of all that passed, summed up by channel."""

    is_identity: ClassVar[bool] = False
    row_squares: Tensor | None = None  # [H, D]
    query_squares: Tensor | None = None  # [H * group, D]

    def transform_rows(self, x: Tensor) -> Tensor:
        self.row_squares = _add_squares(self.row_squares, x)
        return x

    def transform_queries(self, q: Tensor) -> Tensor:
        self.query_squares = _add_squares(self.query_squares, q)
        return q.float()

    def restore_outputs(self, x: Tensor) -> Tensor:
        return x

    def compute_frame(self) -> Frame:
        if self.row_squares is None:
            return Identity()  # values that lie inside the keys
        heads, dim = self.row_squares.shape
        stored = _clamp_squares(self.row_squares)
        # Nobody asks values; and of a model that computes its scores itself no query is seen.
        asked = (
            1 / stored
            if self.query_squares is None
            else self.query_squares.view(heads, -1, dim).mean(1)
        )
        scale = (_clamp_squares(asked) / stored) ** 0.25  # of squares
        even = scale / scale.log().mean(-1, keepdim=True).exp()
        if not even.isfinite().all():
            raise SpecError("smooth: keys, values or queries of this model are no numbers")
        return Diagonal(tuple(tuple(_round_scale(v) for v in head) for head in even.tolist()))


@dataclass(frozen=True)
class SmoothFrames:
    """The frames that one layer's keys and values get."""

    keys: Frame
    values: Frame


@dataclass(frozen=True)
class FramedRaw(Raw):
    """Rows of any width that stay as they are, behind a frame."""

    frame: Frame = field(default_factory=Identity)  # type: ignore[misc]


def fit_smooth_frames(model: PreTrainedModel, spec: CacheSpec) -> CacheSpec:
    """The spec with a scale of this model wherever one is to be fitted."""
    codecs = [codec for layer in iterate_attention(*spec.layers) for codec in layer.sides.values()]
    if not any(needs_fitting(codec.frame) for codec in codecs):
        return spec
    if model not in _fitted_frames:
        _fitted_frames[model] = _fit_frames(get_text_model(model))
    scales = iter(_fitted_frames[model])
    return spec.map_layers(lambda layer: _insert_frames(layer, next(scales)))


def _insert_frames(layer: LayerSpec, frames: SmoothFrames) -> LayerSpec:
    return replace(
        layer,
        keys=_insert_frame(layer.keys, frames.keys),
        values=_insert_frame(layer.values, frames.values),
    )


def _insert_frame(codec: Any, frame: Frame) -> Codec:
    if not needs_fitting(codec.frame):
        return codec  # type: ignore[no-any-return]
    return replace(codec, frame=fill_smoothing(codec.frame, frame))  # type: ignore[no-any-return]


@torch.no_grad()
def _fit_frames(model: PreTrainedModel) -> list[SmoothFrames]:
    """One for each layer that attends."""
    if has_cross_attention(model):
        raise SpecError("smooth is fitted to models that only decode; leave it out")
    layers = get_model_layers(model)
    watched = [(ObservedFrame(), ObservedFrame()) for layer in layers if layer.attends]
    doors = (LayerSpec(FramedRaw(keys), FramedRaw(values), KeepAll()) for keys, values in watched)
    cache = TransformersCache(layers, make_cache_spec(layers, CacheSpec(tuple(doors))))
    config = model.config.get_text_config(decoder=True)
    count = min(MAX_FIT_TOKENS, max_context(config) or MAX_FIT_TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, count), generator=generator, device="cpu")
    modes = {module: module.training for module in model.modules()}
    given = {get_cache_argument(model): cache}
    try:
        model.eval()  # what is dropped at random is none of the model's
        ids = ids.to(model.device)
        with use_kvant_attention(model):  # queries are seen by ours
            model(ids[:, :1], **given)
            for keys, _ in watched:
                keys.query_squares = None  # a first token sees itself alone, whatever it asks
            model(ids[:, 1:], **given)  # behind it, attention asks the cache
    finally:
        for module, training in modes.items():
            module.training = training
    return [SmoothFrames(keys.compute_frame(), values.compute_frame()) for keys, values in watched]


def _add_squares(total: Tensor | None, x: Tensor) -> Tensor:
    more = x.double().square().sum((0, 2))
    return more if total is None else total + more


def _clamp_squares(squares: Tensor) -> Tensor:
    most = float(squares.max())
    return squares.clamp(min=MIN_RELATIVE_SCALE**2 * most) if most else torch.ones_like(squares)


def _round_scale(x: float) -> float:
    return float(f"{x:.{SCALE_DIGITS}g}")
