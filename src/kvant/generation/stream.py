"""`kvant.generate`: stream the continuation of a prompt in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from kvant.generation.conversation import Prompt, find_prompt_branch_points, resolve_prompt
from kvant.generation.decoder import LogitsFunction, SequenceCache
from kvant.generation.drafters import Drafter
from kvant.generation.grammar import Grammar
from kvant.generation.loop import Step
from kvant.generation.prefill import PrefillProgress
from kvant.generation.session import Session
from kvant.prefixes import Prefixes
from kvant.recipes import AnySpec


def generate(
    model: nn.Module | LogitsFunction,
    tokenizer: Any,
    prompt: Prompt,
    *,
    kv_cache: AnySpec | SequenceCache = "raw",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    grammar: Grammar | None = None,
    ignore_end: bool = False,
    max_context: int | None = None,
    prefill_chunk: int = 512,
    strategy: str = "always",
    threshold: int = 512,
    budget: int | str | None = None,
    draft: str | Drafter | nn.Module | LogitsFunction | None = None,
    max_drafts: int = 8,
    backend: str | None = None,
    prefixes: Prefixes | None = None,
    progress: PrefillProgress | None = None,
) -> Iterator[Step]:
    """Stream the continuation of a prompt, a `Step` for each token.

    `model` is a transformers model, or any callable `model(ids, cache) -> logits`. The prompt is
    text, token ids, or messages with roles; `kvant.Messages` adds tools and template options.
    `kv_cache` is a spec, or an empty cache, which the caller may inspect afterwards. `grammar`
    constrains the reply: `kvant.Grammar.json(schema)`.
    `strategy` is always, disabled (recompute everything), long (cache only sequences longer than
    `threshold` tokens) or adaptive (stay within `budget` bytes, also "64MiB"). `draft` proposes
    tokens that one forward verifies: "ngram", or a smaller model with the same tokenizer.
    `backend` reads every layer ("reference", "native", "triton"; default: the first possible). With
    `prefixes`, which other calls may share, no prefix is prefilled twice. Invalid arguments raise
    here, before the first step.

    >>> steps = list(kvant.generate(model, tokenizer, "import ", max_new_tokens=4, ignore_end=True))
    >>> len(steps), steps[-1].finish_reason
    (4, 'length')
    """
    session = Session(
        model,
        tokenizer,
        kv_cache,
        template=False,
        max_context=max_context,
        prefill_chunk=prefill_chunk,
        strategy=strategy,
        threshold=threshold,
        budget=budget,
        draft=draft,
        max_drafts=max_drafts,
        backend=backend,
        prefixes=prefixes,
    )
    tokens = resolve_prompt(tokenizer, prompt)
    branch_points = [] if prefixes is None else find_prompt_branch_points(tokenizer, prompt, tokens)
    return session.send(
        tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
        grammar=grammar,
        ignore_end=ignore_end,
        progress=progress,
        branch_points=branch_points,
    )
