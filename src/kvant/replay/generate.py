"""Replay the tokens that `generate` of an attached model decodes.

`generate` decodes through `get_compiled_call` where `_valid_auto_compile_criteria` allows it, else
through the model itself. `enable_replay` replaces both methods of one model, so that forwards of
single tokens are replayed, and the model runs all others.

A recorded forward is used for one call of `generate`: the model may change between two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from kvant.hf import TransformersCache, replace_method
from kvant.hf.model import TokenForward, get_cache_argument
from kvant.replay.replayer import get_graph_capture, make_replayer

CRITERIA_METHOD = "_valid_auto_compile_criteria"
CALL_METHOD = "get_compiled_call"
MIN_NEW_TOKENS = 24  # of a call that gains more than recording a forward costs
# Arguments of a token's forward that a replay honours, or that do not change its results.
HONOURED_ARGUMENTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"}
)


def enable_replay(model: PreTrainedModel, *, supports_padding: bool) -> None:
    """Replay the tokens that `generate` of an attached model decodes, until `detach`.

    `supports_padding`: sequences of different lengths decode in one forward of this model. A model
    with a decoding loop of its own may call these methods for something else: it is left alone.
    """
    if type(model)._sample is not GenerationMixin._sample:
        return
    replace_method(model, CRITERIA_METHOD, _allow_replay)
    make_call = partial(DecodingCall, supports_padding=supports_padding)
    replace_method(model, CALL_METHOD, make_call)


def _allow_replay(
    model: PreTrainedModel, model_kwargs: dict[str, Any], config: GenerationConfig
) -> bool:
    """Return whether `generate` may decode through `get_compiled_call`."""
    cache = model_kwargs.get(get_cache_argument(model))
    if isinstance(cache, TransformersCache):
        reason = None
        if config.disable_compile:
            reason = "generate has disable_compile=True"
        elif config.is_assistant:
            reason = "an assistant drafts few tokens a call"
        elif config.max_new_tokens is not None and config.max_new_tokens < MIN_NEW_TOKENS:
            reason = f"generate has max_new_tokens={config.max_new_tokens}: {MIN_NEW_TOKENS} pay"
        cache.context.replay_stats.refusal = reason
        return reason is None
    allowed: bool = getattr(type(model), CRITERIA_METHOD)(model, model_kwargs, config)
    return allowed


class DecodingCall:
    """Run the forwards of one call of `generate`: replay single tokens, else call the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        compile_config: CompileConfig | None,
        *,
        supports_padding: bool,
    ) -> None:
        self._model = model
        self._compile_config = compile_config
        self._supports_padding = supports_padding
        self._cache_argument = get_cache_argument(model)
        self._arguments = HONOURED_ARGUMENTS | {self._cache_argument}
        self._replayer = make_replayer(
            model, TokenForward(model), get_graph_capture(model), compile_config=compile_config
        )
        # Class of the outputs of a token's forward; None: unknown, or they have other fields.
        self._output_class: Callable[..., ModelOutput] | None = None

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Return the outputs of the model for these inputs."""
        cache = inputs.get(self._cache_argument)
        if not isinstance(cache, TransformersCache):
            if cache is None or not cache.is_compileable:  # a model may drop its cache (Phi-3)
                return self._model(*args, **inputs)
            compiled = getattr(type(self._model), CALL_METHOD)(self._model, self._compile_config)
            return compiled(*args, **inputs)
        reason = self._explain_ordinary_forward(cache, inputs)
        if args or reason is not None:
            cache.context.replay_stats.refusal = reason
            return self._model(*args, **inputs)
        outputs = self._replay(cache, inputs)
        return self._run_ordinary_forward(cache, inputs) if outputs is None else outputs

    def _explain_ordinary_forward(
        self, cache: TransformersCache, inputs: dict[str, Any]
    ) -> str | None:
        """Return why the model itself must run these inputs; None: a replay may."""
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        if ids is None or ids.shape != (cache.states.batch, 1):
            return "a forward of other inputs than one token of each sequence"
        if positions is not None and positions.shape != ids.shape:
            return f"position_ids {list(positions.shape)}, where {list(ids.shape)} are replayed"
        for name in inputs.keys() - self._arguments:
            if inputs[name] is not None and inputs[name] is not False:
                return f"the forward gets {name}"
        if inputs.get("use_cache") is False or torch.is_grad_enabled():
            return "a forward without a cache, or with gradients"
        return self._explain_hidden_rows(cache, inputs.get("attention_mask"))

    def _explain_hidden_rows(self, cache: TransformersCache, mask: Tensor | None) -> str | None:
        """Return why the mask is needed, which a replay does not read; None: all rows are visible.

        Left padding that is not stored needs no mask: the sequences differ in length.
        """
        page_table = cache.states.state.get_page_table(0)
        if page_table is None:
            return "the cache has no rows of attention"
        if page_table.has_padding and not self._supports_padding:
            return "sequences of different lengths, which this model decodes in turns"
        if mask is None:
            return "padding without a mask" if page_table.has_padding else None
        is_known = mask.ndim == 2 and mask.shape == (page_table.batch, page_table.num_columns + 1)
        if is_known and mask.sum(1).tolist() == (page_table.lengths + 1).tolist():
            return None
        return "an attention_mask that hides stored rows"

    def _replay(self, cache: TransformersCache, inputs: dict[str, Any]) -> ModelOutput | None:
        """Return the outputs of a replayed forward; None: an ordinary one must run."""
        if self._output_class is None or self._replayer is None:
            return None
        ids, positions = inputs["input_ids"], inputs.get("position_ids")
        if positions is None:  # the forward takes none, or the batch has no padding
            positions = torch.full_like(ids, cache.length)
        logits = self._replayer.compute_logits(cache, ids, positions)
        if logits is None:
            return None
        return self._output_class(logits=logits[:, -1:].clone(), **{self._cache_argument: cache})

    def _run_ordinary_forward(self, cache: TransformersCache, inputs: dict[str, Any]) -> Any:
        outputs = self._model(**inputs)
        if self._replayer is not None:
            self._replayer.confirm_forward()
        names = {"logits", self._cache_argument}
        is_plain = isinstance(outputs, ModelOutput) and set(outputs) == names
        self._output_class = type(outputs) if is_plain else None
        if not is_plain:
            cache.context.replay_stats.refusal = "the outputs have more than logits"
        return outputs
