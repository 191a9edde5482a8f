"""Replay the tokens that `generate` of a transformers model decodes.

`generate` decodes through `get_compiled_call` where `_valid_auto_compile_criteria` allows it, else
through the model itself. `enable_replay` replaces both methods of one model, so that the forwards
of single tokens are replayed. The forward of a prompt, and every other call of the model, stay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from kvant.hf import TransformersCache
from kvant.hf.model import TokenForward, get_cache_argument
from kvant.replay.replayer import Replayer, get_graph_capture, make_replayer

CRITERIA_METHOD = "_valid_auto_compile_criteria"
CALL_METHOD = "get_compiled_call"
# Arguments of the forward of a token that change nothing but what a replay reads or returns.
REPLAYED_ARGUMENTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"}
)


def enable_replay(model: PreTrainedModel) -> None:
    """Replay the tokens that `model.generate` decodes with a cache of kvant, where possible.

    A copy of the model, pickled or not, replays its own.
    """
    decoding = ReplayedDecoding(model)
    model.__dict__[CRITERIA_METHOD] = decoding.is_allowed
    model.__dict__[CALL_METHOD] = decoding.get_call


def disable_replay(model: PreTrainedModel) -> None:
    """Undo `enable_replay`; do nothing if it was not called."""
    for name in (CRITERIA_METHOD, CALL_METHOD):
        model.__dict__.pop(name, None)


class ReplayedDecoding:
    """What `generate` of one model calls for each forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache_argument = get_cache_argument(model)
        self._arguments = REPLAYED_ARGUMENTS | {self._cache_argument}
        self._lock = Lock()  # a second thread decodes by ordinary forwards meanwhile
        self._replayer: Replayer | None = None
        self._cache: ref[TransformersCache] | None = None  # that was replayed last
        # Of an ordinary forward of one token, if it has only logits and the cache.
        self._output_type: Callable[..., ModelOutput] | None = None

    def __reduce__(self) -> tuple[type[ReplayedDecoding], tuple[PreTrainedModel]]:
        """Copy no captured forward: it reads the memory of this model."""
        return ReplayedDecoding, (self._model,)

    def is_allowed(self, model_kwargs: dict[str, Any], config: GenerationConfig) -> bool:
        """Stand in for the criteria of transformers, which allow only static caches."""
        if isinstance(model_kwargs.get(self._cache_argument), TransformersCache):
            return not config.disable_compile
        allowed: bool = getattr(type(self._model), CRITERIA_METHOD)(
            self._model, model_kwargs, config
        )
        return allowed

    def get_call(self, compile_config: CompileConfig | None) -> Callable[..., Any]:
        """Stand in for `get_compiled_call`."""
        return partial(self._decode, compile_config)

    def _decode(self, compile_config: CompileConfig | None, **inputs: Any) -> Any:
        """Return the outputs of the model, replayed for one token of each sequence."""
        cache = inputs.get(self._cache_argument)
        if not isinstance(cache, TransformersCache):
            compiled = getattr(type(self._model), CALL_METHOD)(self._model, compile_config)
            return compiled(**inputs)
        if not self._is_replayable(cache, inputs) or not self._lock.acquire(blocking=False):
            return self._model(**inputs)
        try:
            outputs = self._replay(cache, inputs)
            return self._run_ordinary_forward(inputs) if outputs is None else outputs
        finally:
            self._lock.release()

    def _is_replayable(self, cache: TransformersCache, inputs: dict[str, Any]) -> bool:
        """Whether a forward takes one token of each sequence, and nothing that a replay ignores."""
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        others = (inputs[name] for name in inputs.keys() - self._arguments)
        return (
            ids is not None
            and ids.shape == (cache.states.batch, 1)
            and (positions is None or positions.shape == ids.shape)
            and inputs.get("use_cache") is not False
            and all(value is None or value is False for value in others)
            and not torch.is_grad_enabled()
            and _shows_all_rows(cache, inputs.get("attention_mask"))
        )

    def _replay(self, cache: TransformersCache, inputs: dict[str, Any]) -> ModelOutput | None:
        """Return the outputs of a replayed forward; None: an ordinary one must run."""
        if self._output_type is None:
            return None
        if self._replayer is None:
            capture = get_graph_capture(self._model)
            self._replayer = make_replayer(self._model, TokenForward(self._model), capture)
        if self._replayer is None:
            return None
        if self._cache is None or self._cache() is not cache:
            self._cache = None  # first, so that an older cache releases no pages of this one
            self._cache = ref(cache, partial(_release_pages, ref(self)))
        ids, positions = inputs["input_ids"], inputs.get("position_ids")
        if positions is None:
            positions = torch.full_like(ids, cache.length)
        logits = self._replayer.compute_logits(cache, ids, positions)
        if logits is None:
            return None
        return self._output_type(logits=logits[:, -1:].clone(), **{self._cache_argument: cache})

    def _run_ordinary_forward(self, inputs: dict[str, Any]) -> Any:
        outputs = self._model(**inputs)
        if self._replayer is not None:
            self._replayer.confirm_forward()
        names = {"logits", self._cache_argument}
        is_plain = isinstance(outputs, ModelOutput) and set(outputs) == names
        self._output_type = type(outputs) if is_plain else None
        return outputs


def _release_pages(decoding_ref: ref[ReplayedDecoding], cache: object) -> None:
    """Release the pages of the cache that was replayed last, once its user has dropped it."""
    decoding = decoding_ref()
    if decoding is not None and decoding._replayer is not None:
        decoding._replayer.release_pages()


def _shows_all_rows(cache: TransformersCache, mask: Tensor | None) -> bool:
    """Whether a mask hides no stored row, nor the token that is decoded; replays read no mask."""
    page_table = cache.states.state.get_page_table(0)
    if page_table is None:
        return False
    if mask is None:
        return not page_table.has_padding
    if mask.ndim != 2 or mask.shape != (page_table.batch, page_table.num_columns + 1):
        return False
    return cast(bool, mask.sum(1).tolist() == (page_table.lengths + 1).tolist())
