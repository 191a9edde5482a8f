"""The model `kvant` of lm-eval: log-likelihoods and generations through a kvant cache.

lm-eval's own models compute log-likelihoods without a cache, so a format would change nothing. Here
they are computed with `prefill="stored"`: each token attends to the rows that decoding would read.
Generations read their prompts as the spec says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from kvant import checkpoints
from kvant.hf import cache_for, get_cache_argument, supports_chunked_prefill
from kvant.lm_eval import MODEL_NAME
from kvant.platform.devices import AUTO_DTYPE
from kvant.probing import make_trial, resolve_auto
from kvant.probing.divergence import MAX_FORWARD_TOKENS, make_empty_cache
from kvant.spec.language import is_auto

LM_EVAL_DEVICE = "cuda:0"  # what lm-eval passes without --device
OWN_OPTIONS = ("pretrained", "kv_cache", "device", "dtype", "weights", "trust_remote_code")
# Options of lm-eval's `hf` model, without those for loading it.
HF_OPTIONS = {"batch_size", "max_batch_size", "max_length", "truncation", "logits_cache"}
HF_OPTIONS |= {"add_bos_token", "prefix_token_id", "softmax_dtype", "mixed_precision_dtype"}
HF_OPTIONS |= {"think_end_token", "enable_thinking", "chat_template_args"}

log = logging.getLogger("kvant")


@register_model(MODEL_NAME)
class KVCacheModel(HFLM):  # type: ignore[misc]  # lm-eval is untyped
    """A model that lm-eval evaluates, with a new cache for each batch.

    `pretrained` is what `kvant run --model` takes: a name, a folder or a GGUF file; without it, the
    model inside. `kv_cache` is a spec or `auto`. `options`: see HF_OPTIONS.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        kv_cache: str = "raw",
        device: str | None = None,
        dtype: str = AUTO_DTYPE,
        weights: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        if unknown := sorted(set(options) - HF_OPTIONS):
            raise ValueError(
                f"model_args has {unknown[0]!r}: known are {', '.join(OWN_OPTIONS)} and "
                f"{', '.join(sorted(HF_OPTIONS))}; a spec with commas needs quotes: "
                "--model_args 'pretrained=NAME,kv_cache=\"affine4,tail=0\"'"
            )
        if device == LM_EVAL_DEVICE and not torch.cuda.is_available():
            device = None
        model, tokenizer = checkpoints.load(
            pretrained,
            flag="pretrained",
            device=device,
            dtype=dtype,
            weights=weights,
            trust_code=trust_remote_code,
        )
        spec = kv_cache
        if is_auto(kv_cache):
            spec = str(resolve_auto(model, kv_cache, make_trial(model, tokenizer)))
            log.warning("kv_cache=%s: %s", kv_cache, spec)
        self.kv_cache = spec
        self.stored_spec = make_empty_cache(model, spec).spec  # first: an invalid spec raises
        self.spec = cache_for(model, spec).spec
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", **options)
        self.pretrained = pretrained or ""  # a name, for `get_model_info`

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> KVCacheModel:
        """Let model_args override options of the command line, which always have values."""
        options = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**options | dict(arg_dict))

    def get_model_info(self) -> dict[str, Any]:
        """Return what the results say of the model, with the spec of its cache."""
        info: dict[str, Any] = super().get_model_info()
        return info | {"kv_cache": self.kv_cache}

    def _loglikelihood_tokens(self, *args: Any, **options: Any) -> Any:
        if self.stored_spec.prunes:
            raise ValueError(
                "kv_cache with prune=: log-likelihoods are not scored after a prune; run tasks "
                "that generate text, or drop prune="
            )
        return super()._loglikelihood_tokens(*args, **options)

    def _model_call(
        self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Return the logits [B, T, vocabulary] of sequences that are padded on the right."""
        cache = {get_cache_argument(self.model): cache_for(self.model, self.stored_spec)}
        size = MAX_FORWARD_TOKENS if supports_chunked_prefill(self.model) else inps.shape[1]
        dtype = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            parts = [
                self.model(input_ids=part, use_cache=True, **cache).logits
                for part in torch.split(inps, size, dim=1)
            ]
        return torch.cat(parts, dim=1)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        """Return the tokens of prompts that are padded on the left, and of their continuations."""
        cache = cache_for(self.model, self.spec, attention_mask=options.get("attention_mask"))
        tokens: Tensor = super()._model_generate(
            context, max_length, stop, **{get_cache_argument(self.model): cache}, **options
        )
        return tokens
