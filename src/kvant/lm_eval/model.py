"""The model `kvant` of lm-eval: log-likelihoods and generations through a kvant cache.

lm-eval's own models compute log-likelihoods without a cache, so a format would change nothing. Here
prompts are read with `prefill="stored"`: each token attends to the rows that decoding would read.
"""

from __future__ import annotations

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


@register_model(MODEL_NAME)
class CachedModel(HFLM):  # type: ignore[misc]  # lm-eval is untyped
    """A model that lm-eval evaluates, with a new cache for each batch.

    `pretrained` is what `kvant run --model` takes: a name, a folder or a GGUF file; without it, the
    model inside. `kv_cache` is a spec or `auto`. `options` are those of lm-eval's `hf` model that
    do not load one, such as `batch_size`, `max_length` and `add_bos_token`.
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
        model, tokenizer = checkpoints.load(
            pretrained,
            flag="pretrained",
            device=device,
            dtype=dtype,
            weights=weights,
            trust_code=trust_remote_code,
        )
        spec = resolve_auto(model, kv_cache, make_trial(model, tokenizer))
        self.cache_spec = make_empty_cache(model, spec).spec  # first: an invalid spec raises
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", **options)

    def _model_call(
        self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Return the logits [B, T, vocabulary] of sequences that are padded on the right."""
        if self.cache_spec.prunes:
            raise ValueError(
                "kv_cache with prune=: a log-likelihood has no prompt to prune after: use it with "
                "tasks that generate text, or drop prune="
            )
        cache = {get_cache_argument(self.model): cache_for(self.model, self.cache_spec)}
        size = MAX_FORWARD_TOKENS if supports_chunked_prefill(self.model) else inps.shape[1]
        with torch.no_grad():
            parts = [
                self.model(input_ids=part, use_cache=True, **cache).logits
                for part in torch.split(inps, size, dim=1)
            ]
        return torch.cat(parts, dim=1)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        """Return the tokens of prompts that are padded on the left, and of their continuations."""
        cache = cache_for(self.model, self.cache_spec, attention_mask=options.get("attention_mask"))
        tokens: Tensor = super()._model_generate(
            context, max_length, stop, **{get_cache_argument(self.model): cache}, **options
        )
        return tokens
