"""Fit channel scales to a model, from one forward (the spec word `smooth`).

In many models a few channels of the keys are far larger than the others, the same ones in every
row. In a quantization group they leave no precision for the rest. With s = sqrt(rms of queries /
rms of keys) in each channel, s k and q / s have the same rms, and the scores are unchanged.
Values are scaled by s = 1 / rms, which the outputs undo. The magnitudes follow from the weights,
so random tokens are as good as a text.

The fit does not depend on the format of the spec, since it uses a cache of raw rows. An
ObservedFrame records the rows and queries that pass through it.
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
from kvant.contracts import Frame
from kvant.errors import SpecError
from kvant.hf.attention import use_kvant_attention
from kvant.hf.cache import TransformersCache
from kvant.hf.model import (
    get_cache_argument,
    get_model_layers,
    get_text_model,
    has_cross_attention,
    make_cache_spec,
    restore_modules,
)
from kvant.models import max_context
from kvant.recipes import CacheSpec, LayerSpec, iterate_attention
from kvant.retention import KeepAll

MAX_FIT_TOKENS = 256
MIN_RELATIVE_SCALE = 1e-3  # of the largest channel: a lower bound for the others
SCALE_DIGITS = 4

SideFrames = dict[str, Frame]  # the fitted frames of a layer: of its keys and of its values
# Fitted once per model. If the weights change later, scores stay correct.
_fitted_frames: WeakKeyDictionary[PreTrainedModel, list[SideFrames]] = WeakKeyDictionary()


@dataclass(eq=False)
class ObservedFrame:
    """An identity frame that sums the squares of rows and queries by channel."""

    is_identity: ClassVar[bool] = False  # so that its methods are called
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
        """Return the frame that scales each channel by s (see the module docstring)."""
        if self.row_squares is None:
            return Identity()  # no separate values: they are inside the keys
        heads, dim = self.row_squares.shape
        row_squares = _clamp_squares(self.row_squares)
        # Values have no queries. If the model reads the keys as dense rows, no query passes their
        # frame either. Without queries, s = 1 / rms.
        query_squares = (
            1 / row_squares
            if self.query_squares is None
            else self.query_squares.view(heads, -1, dim).mean(1)
        )
        scale = (_clamp_squares(query_squares) / row_squares) ** 0.25  # squares -> s
        normalized = scale / scale.log().mean(-1, keepdim=True).exp()
        if not normalized.isfinite().all():
            raise SpecError(
                "smooth: keys, values or queries of this model are NaN or infinite; leave it out"
            )
        heads_of_scales = normalized.tolist()
        return Diagonal(
            tuple(tuple(float(f"{v:.{SCALE_DIGITS}g}") for v in head) for head in heads_of_scales)
        )


@dataclass(frozen=True)
class FramedRaw(Raw):
    """The raw codec with a frame."""

    frame: Frame = field(default_factory=Identity)  # type: ignore[misc]


def fit_smooth_frames(model: PreTrainedModel, spec: CacheSpec) -> CacheSpec:
    """Fill the smoothing placeholders of a spec with scales fitted to the model."""
    codecs = [codec for layer in iterate_attention(*spec.layers) for codec in layer.sides.values()]
    if not any(needs_fitting(codec.frame) for codec in codecs):
        return spec
    if model not in _fitted_frames:
        _fitted_frames[model] = _fit_frames(get_text_model(model))
    frames = iter(_fitted_frames[model])
    return spec.map_layers(lambda layer: _insert_frames(layer, next(frames)))


def _insert_frames(layer: LayerSpec, frames: SideFrames) -> LayerSpec:
    codecs: dict[str, Any] = {"keys": layer.keys, "values": layer.values}
    for side, codec in codecs.items():
        if needs_fitting(codec.frame):
            codecs[side] = replace(codec, frame=fill_smoothing(codec.frame, frames[side]))
    return replace(layer, **codecs)


@torch.no_grad()
def _fit_frames(model: PreTrainedModel) -> list[SideFrames]:
    """Fit the frames of each attention layer by a forward over random tokens."""
    if has_cross_attention(model):
        raise SpecError("smooth can be fitted only to models that only decode; leave it out")
    layers = get_model_layers(model)
    observed = [(ObservedFrame(), ObservedFrame()) for layer in layers if layer.attends]
    specs = (LayerSpec(FramedRaw(keys), FramedRaw(values), KeepAll()) for keys, values in observed)
    cache = TransformersCache(layers, make_cache_spec(layers, CacheSpec(tuple(specs))))
    config = model.config.get_text_config(decoder=True)
    count = min(MAX_FIT_TOKENS, max_context(config) or MAX_FIT_TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, count), generator=generator, device="cpu")
    arguments = {get_cache_argument(model): cache}
    # kvant's attention passes queries through the frames.
    with restore_modules(model), use_kvant_attention(model):
        model.eval()  # no dropout
        ids = ids.to(model.device)
        model(ids[:, :1], **arguments)
        for keys, _ in observed:
            keys.query_squares = None  # the first token attends to itself only
        # In one chunk, the tokens would attend to their own rows, and no query would pass a frame.
        model(ids[:, 1:], **arguments)
    return [
        {"keys": keys.compute_frame(), "values": values.compute_frame()}
        for keys, values in observed
    ]


def _add_squares(total: Tensor | None, x: Tensor) -> Tensor:
    squares = x.double().square().sum((0, 2))
    return squares if total is None else total + squares


def _clamp_squares(squares: Tensor) -> Tensor:
    maximum = float(squares.max())
    return (
        squares.clamp(min=MIN_RELATIVE_SCALE**2 * maximum) if maximum else torch.ones_like(squares)
    )
