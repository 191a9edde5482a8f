"""`kvant.generate` and its loop: turn a prompt into a stream of steps, one `Step` per token.

    tokens   |--- prompt ---|-- generated --|
    cache    |----------------------------|      one token behind

The cache is one token behind: the forward of the next step runs only when that step is requested.
So a caller may stop after any step, and cache and tokens agree. While accepted drafts are handed
out, the cache is ahead of the steps; closing the stream rewinds it.

Text is held back while it is uncertain: a token may end inside a character, and the last
characters may begin a stop string, which is never part of the output. The loop needs neither
transformers nor a cache format.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Unpack

from torch import Tensor, nn

from kvant.cache.pruning import count_tokens_until_prune
from kvant.errors import PromptError
from kvant.generation.conversation import Prompt, encode_prompt, find_branch_points
from kvant.generation.decoder import Decoder, LogitsFunction, TransformersDecoder, make_decoder
from kvant.generation.detokenizer import IncrementalDetokenizer
from kvant.generation.grammar import make_matcher
from kvant.generation.images import ImageReader, PromptImages
from kvant.generation.prefiller import Prefiller, PrefillProgress
from kvant.generation.sampling import SampledToken, Sampler
from kvant.generation.second_pass import SecondPass
from kvant.generation.settings import (
    Sampling,
    SamplingOptions,
    StopConditions,
    check_strategy,
    find_smallest_limit,
    make_sampling,
)
from kvant.generation.speculation import (
    Acceptance,
    Drafter,
    DraftSizer,
    DraftTarget,
    Proposal,
    make_drafter,
)
from kvant.generation.strategy import AdaptiveStrategy, SequenceCache
from kvant.hf import TransformersCache
from kvant.platform.sizes import as_bytes
from kvant.prefixes import Prefixes, PrefixNamespace
from kvant.recipes import AnySpec

# "stop": end token or stop string; "length": token limit or context; "cancelled": by the caller.
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Step:
    """One generated token; `text` is the newly certain text, which may be empty.

    >>> step = next(kvant.generate(model, tokenizer, "import "))
    >>> isinstance(step.text, str), step.logprob <= 0, step.finish_reason
    (True, True, None)
    """

    token: int
    text: str
    logprob: float  # of the token, under the distribution that it was sampled from
    finish_reason: FinishReason | None = None
    drafted: bool = False  # an accepted draft
    likeliest: tuple[tuple[int, float], ...] = ()  # alternatives and logprobs, if requested
    choice: int = 0  # index among several continuations of a prompt
    stop_string: str | None = None  # the one that ended the text


class Output:
    """The tokens after a prompt as steps, and the conditions that end them."""

    def __init__(self, tokenizer: Any, conditions: StopConditions, tokens: list[int]) -> None:
        """Append to `tokens`, which are those of the prompt."""
        self.tokens = tokens
        self.prompt_length = len(tokens)
        self.end_tokens = conditions.end_tokens
        self._max_length = self.prompt_length + conditions.count_new_tokens(self.prompt_length)
        self._pieces: list[str] = []
        self.detokenizer = IncrementalDetokenizer(
            tokenizer,
            conditions.stop,
            tokens,
            include_special_tokens=conditions.include_special_tokens,
        )

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self._max_length - len(self.tokens)

    @property
    def text(self) -> str:
        """The text of all steps."""
        return "".join(self._pieces)

    def append_token(
        self, sampled: SampledToken, *, drafted: bool = False, choice: int = 0
    ) -> Step:
        """Append a token; return its step, which has a finish reason if it is the last."""
        token, detokenizer = sampled.token, self.detokenizer
        self.tokens.append(token)
        reason: FinishReason | None = None
        if token in self.end_tokens:
            piece, reason = detokenizer.flush(), "stop"
        else:
            piece = detokenizer.append_token(token)
            if detokenizer.has_stopped or len(self.tokens) >= self._max_length:
                piece += detokenizer.flush()
                reason = "stop" if detokenizer.has_stopped else "length"
        self._pieces.append(piece)
        return Step(
            token,
            piece,
            sampled.logprob,
            reason,
            drafted,
            sampled.top_logprobs,
            choice,
            detokenizer.stop_string,
        )


class GenerationOptions(SamplingOptions, total=False):
    """The keyword arguments of `GenerationLoop`."""

    max_context: int | None
    prefill_chunk: int
    strategy: str
    threshold: int
    budget: int | str | None
    draft: str | Drafter | nn.Module | None
    max_drafts: int
    backend: str | None
    prefixes: Prefixes | None


class GenerationLoop:
    """A model, its tokenizer and the cache of one sequence: generates steps after prompts."""

    def __init__(
        self,
        model: nn.Module | LogitsFunction,
        tokenizer: Any,
        kv_cache: AnySpec | SequenceCache = "raw",
        *,
        max_context: int | None = None,
        prefill_chunk: int = 512,
        strategy: str = "always",
        threshold: int = 512,
        budget: int | str | None = None,
        draft: str | Drafter | nn.Module | None = None,
        max_drafts: int = 8,
        backend: str | None = None,
        prefixes: Prefixes | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> None:
        decoder = make_decoder(model)
        own_model = decoder.model if isinstance(decoder, TransformersDecoder) else model
        tokenizer, self._image_reader = ImageReader.from_processor(tokenizer, own_model)
        cache = decoder.make_cache(kv_cache, tokenizer)
        if backend is not None:
            cache.backend = backend
        if cache.length:
            raise ValueError(
                f"a cache of {cache.length} tokens: start with an empty one; kvant.Session keeps "
                "one cache over many turns"
            )
        check_strategy(strategy, threshold, budget)
        if budget is not None and cache.spec.prunes:
            raise ValueError("a budget and a prune in the spec: use one of them to drop rows")
        if prefixes is not None:
            if isinstance(kv_cache, TransformersCache):
                raise TypeError("a cache and prefixes: prefixes make their own cache; give a spec")
            if budget is not None:
                raise ValueError("a budget and prefixes: all prefixes are stored with one spec")
            if draft is not None:
                cache.ensure_slack(max_drafts + 1)  # the namespace depends on it
        self._prefixes = prefixes
        self.prefiller = Prefiller(
            decoder,
            cache,
            prefill_chunk,
            threshold={"disabled": math.inf, "long": threshold}.get(strategy, 0),
            adaptive=None if budget is None else AdaptiveStrategy(as_bytes(budget)),
            prefixes=self._open_namespace(decoder, cache),
            second_pass=SecondPass.from_spec(cache.spec, tokenizer, decoder.max_context),
        )
        self.tokenizer = tokenizer
        self.drafter = None if draft is None else make_drafter(draft)
        self._acceptance = Acceptance()
        # The proposals of n-grams take no time: a forward verifies only as many as pay.
        self._draft_sizer = DraftSizer(max_drafts) if draft == "ngram" else None
        self.sampling = make_sampling(sampling)
        self._own_context = decoder.max_context if max_context is None else max_context
        self.stop_conditions = StopConditions(
            max_context=find_smallest_limit(self._own_context, cache.capacity),
            vocab_size=decoder.vocab_size,
            max_drafts=max_drafts,
        )
        self.num_drafts = self.num_accepted_drafts = 0

    def process_images(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the images of its messages processed for the model."""
        return self._image_reader.process_images(prompt, self.stop_conditions.max_context)

    def locate_images(self, prompt: Prompt, tokens: Sequence[int]) -> PromptImages | None:
        """Return the images of a processed prompt that was encoded as `tokens`, if it has any."""
        images, prefiller = self._image_reader.locate_images(prompt, tokens), self.prefiller
        if images is None:
            return None
        images.check_cache(prefiller.second_pass, prefiller.alignment)
        if prefiller.threshold:
            raise PromptError(
                "images with strategy=disabled or long, which read text alone: use strategy=always"
            )
        return images

    def start(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        progress: PrefillProgress | None = None,
        branch_points: Sequence[int] = (),
        images: PromptImages | None = None,
        commit: Callable[[Output], Sequence[int]] = lambda output: output.tokens,
    ) -> Generator[Step, None, None]:
        """Return the steps after `prompt`; prefill only what the cache does not hold.

        `images` are those of the prompt, from `locate_images`. `branch_points` are lengths at which
        other prompts may differ from this one. `commit` is called at the end, however the steps
        end, and returns the tokens that the cache keeps.
        Invalid arguments raise here, before the first step.
        """
        conditions = replace(
            self.stop_conditions,
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            end_tokens=frozenset() if ignore_end else self.prefiller.decoder.end_tokens,
        )
        sampling.check_tokens(conditions.vocab_size)
        matcher = make_matcher(sampling.grammar, self.tokenizer, conditions.end_tokens)
        conditions.check_prompt(prompt)
        if self.prefiller.second_pass is not None and len(prompt) > self.prefiller.threshold:
            self.prefiller.second_pass.check_room(len(prompt))
        output = Output(self.tokenizer, conditions, list(prompt))
        sampler = Sampler(sampling, len(prompt), matcher)
        prefill = partial(self.prefiller.prefill, output.tokens, progress, branch_points, images)
        return self._generate_steps(output, sampler, prefill, commit)

    def _generate_steps(
        self,
        output: Output,
        sampler: Sampler,
        prefill: Callable[[], Tensor],
        commit: Callable[[Output], Sequence[int]],
    ) -> Generator[Step, None, None]:
        prefiller, tokens, drafts = self.prefiller, output.tokens, list[int]()
        self._acceptance.pending = None  # a proposal for another text
        is_finalizing = sys.is_finalizing  # at the end of the interpreter, modules are gone
        try:
            rows = prefill()[None]
            while True:
                for logits, draft in zip(rows, [*drafts, None], strict=True):
                    sampled = sampler.sample(logits, tokens)
                    is_accepted = sampled.token == draft
                    self.num_accepted_drafts += is_accepted
                    step = output.append_token(sampled, drafted=is_accepted)
                    yield step
                    if step.finish_reason is not None:
                        return
                    if not step.drafted:
                        break
                if self.drafter is None:
                    rows = prefiller.compute_next_logits(tokens)
                    continue
                target = DraftTarget(sampler, rows.shape[-1])
                drafts = self._propose_drafts(self.drafter, target, output)
                rows = self._verify_drafts(tokens, drafts)
        finally:
            if not is_finalizing():
                kept = commit(output)  # first: an interrupt of what follows loses no reply
                prefiller.align_cache(tokens)  # drops drafts whose steps were not reached
                prefiller.settle(kept)

    def _propose_drafts(self, drafter: Drafter, target: DraftTarget, output: Output) -> list[int]:
        """Propose drafts, if at least one and the token after it may still be generated."""
        cache, max_drafts = self.prefiller.cache, self.stop_conditions.max_drafts
        limit = min(max_drafts, output.num_remaining - 1)
        if cache.capacity is not None:
            limit = min(limit, cache.capacity - len(output.tokens))
        until_prune = count_tokens_until_prune(cache.state)
        if until_prune is not None:  # the forward also has the token before the drafts
            limit = min(limit, until_prune - 1)
        drafts = drafter.propose_drafts(output.tokens, limit, target) if limit > 0 else []
        if self._draft_sizer is not None:
            self._acceptance.record_proposal(output.tokens, drafts)
            proposals = [Proposal(len(drafts), self._acceptance)]
            recomputes = cache.is_recurrent
            size = self._draft_sizer.choose_num_drafts(proposals, limit, recomputes=recomputes)
            drafts = drafts[:size]
        self.num_drafts += len(drafts)
        if drafts:
            cache.ensure_slack(max_drafts + 1)
        return drafts

    def _verify_drafts(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """Return the logits after the newest token, and after each draft."""
        decoder, num_new, begin = self.prefiller.decoder, 1 + len(drafts), time.perf_counter()
        num_unsteady = decoder.num_unsteady_forwards
        rows = self.prefiller.compute_next_logits([*tokens, *drafts], num_new)
        if (sizer := self._draft_sizer) is not None:
            float(rows[0, 0])  # waits for a GPU
            is_steady = decoder.num_unsteady_forwards == num_unsteady
            record = sizer.record_forward if is_steady else sizer.record_capture
            record(1, num_new, time.perf_counter() - begin)
        return rows

    def replace_cache(self, cache: SequenceCache, tokens: Sequence[int]) -> None:
        """Go on with another cache, which holds `tokens`."""
        old = self.prefiller
        self.prefiller = Prefiller(
            old.decoder,
            cache,
            old.chunk_size,
            threshold=old.threshold,
            adaptive=old.adaptive,
            prefixes=self._open_namespace(old.decoder, cache),
            second_pass=SecondPass.from_spec(cache.spec, self.tokenizer, old.decoder.max_context),
            tokens=tokens,
        )
        max_context = find_smallest_limit(self._own_context, cache.capacity)
        self.stop_conditions = replace(self.stop_conditions, max_context=max_context)

    def _open_namespace(self, decoder: Decoder, cache: SequenceCache) -> PrefixNamespace | None:
        """Open the prefixes of this model and the cache's spec, if there are any."""
        if self._prefixes is None:
            return None
        if not isinstance(decoder, TransformersDecoder) or not isinstance(cache, TransformersCache):
            raise TypeError("prefixes need a transformers model: its weights identify them")
        return self._prefixes.open_namespace(decoder.model, cache)

    def fork(self) -> GenerationLoop:
        """Return an independent loop with the same tokens."""
        fork = copy.copy(self)
        fork.prefiller = self.prefiller.fork()
        fork.drafter = None if self.drafter is None else self.drafter.fork()
        fork._acceptance = self._acceptance.fork()
        fork._draft_sizer = copy.deepcopy(self._draft_sizer)
        return fork


def generate(
    model: nn.Module | LogitsFunction,
    tokenizer: Any,
    prompt: Prompt,
    *,
    kv_cache: AnySpec | SequenceCache = "raw",
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    ignore_end: bool = False,
    progress: PrefillProgress | None = None,
    **options: Unpack[GenerationOptions],
) -> Iterator[Step]:
    """Stream the continuation of a prompt, a `Step` for each token.

    `model` is a transformers model, or any callable `model(ids, cache) -> logits`. The prompt is
    text, token ids, or messages with roles; `kvant.Messages` adds tools and template options.
    `kv_cache` is a spec, or an empty cache, which the caller may inspect afterwards.

    The options are those of `Sampling`, or `sampling`: an instance, whose fields they replace.
    `grammar` constrains the reply: `kvant.Grammar.json(schema)`. The other options are:

    * `max_context`: a limit on all tokens (default: the model's); `prefill_chunk=512` tokens.
    * `strategy`: always, disabled (recompute everything), long (cache only sequences longer than
      `threshold=512` tokens) or adaptive (stay within `budget` bytes, also "64MiB").
    * `draft` proposes up to `max_drafts=8` tokens that one forward verifies: "ngram", or a smaller
      model with the same tokenizer.
    * `backend` reads every layer: "reference", "native", "triton" (default: the first possible).
    * `prefixes`, which other calls may share: no prefix is prefilled twice.

    Invalid arguments raise here, before the first step.

    >>> steps = list(kvant.generate(model, tokenizer, "import ", max_new_tokens=4, ignore_end=True))
    >>> len(steps), steps[-1].finish_reason
    (4, 'length')
    """
    loop = GenerationLoop(model, tokenizer, kv_cache, **options)
    if max_new_tokens == 1:  # the token is known before a second pass
        loop.prefiller.second_pass = None
    prompt = loop.process_images(prompt)
    tokenizer, shares = loop.tokenizer, loop.prefiller.prefixes is not None
    tokens = encode_prompt(tokenizer, prompt)
    return loop.start(
        tokens,
        loop.sampling,
        max_new_tokens=max_new_tokens,
        stop=stop,
        ignore_end=ignore_end,
        progress=progress,
        branch_points=find_branch_points(tokenizer, prompt, tokens) if shares else (),
        images=loop.locate_images(prompt, tokens),
    )
