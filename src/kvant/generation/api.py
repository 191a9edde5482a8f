"""`kvant.generate`: one call from a prompt to a stream of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvant.generation.decoder import Memory, Spec, decoder_of
from kvant.generation.loop import Limits, Progress, Run
from kvant.generation.sampling import Sampling
from kvant.generation.step import Step


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int],
    *,
    kv_cache: Spec | Memory = "raw",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    ignore_end: bool = False,
    max_context: int | None = None,
    prefill_chunk: int = 512,
    progress: Progress | None = None,
) -> Iterator[Step]:
    """Stream the continuation of a prompt, a `Step` for each token.

    `model` is a model of transformers, or any callable `model(ids, cache) -> logits`. `kv_cache` is
    a spec, or an empty cache to use, from which the caller may read what there was. What is wrong
    with the arguments is said here, before the first step.
    """
    decoder = decoder_of(model)
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    limits = Limits(
        max_new_tokens,
        (stop,) if isinstance(stop, str) else tuple(stop),
        frozenset() if ignore_end else decoder.end_tokens,
        decoder.context if max_context is None else max_context,
        prefill_chunk,
    )
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    limits.check_prompt(len(ids))
    memory = decoder.memory(kv_cache) if isinstance(kv_cache, Spec) else kv_cache
    if memory.length:
        raise ValueError(f"a cache of {memory.length} tokens: generate begins with an empty one")
    return Run(decoder, memory, sampling, limits, tokenizer).steps(ids, progress)
