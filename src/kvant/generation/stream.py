"""`kvant.generate`: one call from a prompt to a stream of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvant.generation.conversation import Prompt, find_prompt_branch_points, resolve_prompt
from kvant.generation.decoder import SequenceCache
from kvant.generation.drafters import Drafter
from kvant.generation.grammar import Grammar
from kvant.generation.loop import Step
from kvant.generation.prefill import PrefillProgress
from kvant.generation.session import Session
from kvant.prefixes import Prefixes
from kvant.recipes import AnySpec


def generate(
    model: Any,
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
    draft: Any | Drafter | None = None,
    max_drafts: int = 8,
    backend: str | None = None,
    prefixes: Prefixes | None = None,
    progress: PrefillProgress | None = None,
) -> Iterator[Step]:
    """Stream the continuation of a prompt, a `Step` for each token.

    `model` is a model of transformers, or any callable `model(ids, cache) -> logits`. The prompt is
    text, token ids, or messages with roles (`kvant.Messages` tells a template more than these).
    `kv_cache` is a spec, or an empty cache to use, from which the caller may read what there was.
    A reply follows the `grammar`: `kvant.Grammar.json(schema)`. `strategy` is always, disabled
    (compute everything anew), long (keep only what passes `threshold` tokens) or adaptive (stay
    under `budget` bytes, "64MiB" too). `draft` guesses tokens that are verified together: "ngram",
    or a smaller model with the same tokenizer. `backend` reads every layer ("reference", "native",
    "triton"), else the first that can. With `prefixes`, which other calls may share, nothing is
    read twice. What is wrong with the arguments is said here, before the first step.

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
    marks = [] if prefixes is None else find_prompt_branch_points(tokenizer, prompt, tokens)
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
        branch_points=marks,
    )
