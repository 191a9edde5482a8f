"""A request in the engine, and the sequences that answer it.

The scheduler reads and writes the counts of a request; the engine's thread owns its sequences. A
request does not know its client: the engine maps each open request to a `RequestFuture`.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from traceback import clear_frames
from typing import Any

import numpy as np
from torch import Tensor

from kvant.adapters import Adapter
from kvant.engine.timeline import Timeline
from kvant.generation import TransformersDecoder
from kvant.generation.grammar import make_matcher
from kvant.generation.images import PromptImages
from kvant.generation.loop import Output
from kvant.generation.sampling import SampledToken, Sampler, sample_batch
from kvant.generation.second_pass import Repetition
from kvant.generation.settings import Sampling, StopConditions
from kvant.hf import TransformersCache
from kvant.page_table import Ints
from kvant.prefixes import PrefixNamespace
from kvant.vision import NO_IMAGES, ImageLayout, ProcessedImage

AGING_MS = 10_000  # milliseconds of waiting that raise the priority by 1
# Runs one chunk of a prompt over its cache; returns its last logits, or the embedding so far.
ChunkForward = Callable[[TransformersDecoder, list[int], TransformersCache], Tensor]
NO_SLOTS: Ints = np.zeros(1, np.int64)  # broadcasts to the slots of all pools


def compute_last_logits(
    decoder: TransformersDecoder, ids: list[int], cache: TransformersCache
) -> Tensor:
    """Run a chunk of a prompt; return the logits [vocabulary] after it."""
    return decoder.compute_logits(ids, cache)[-1]


@dataclass(eq=False)
class Sequence:
    """A sequence: its tokens, and its cache while it is not in the batch."""

    tokens: list[int]  # a token is appended before each decode
    choice: int = 0  # which continuation of its prompt it is
    adapter: Adapter | None = field(default=None, repr=False)  # of its forwards
    num_prefilled: int = 0  # first tokens that were prefilled, not decoded
    cache: TransformersCache | None = field(default=None, repr=False)
    swap_file: Path | None = None  # holds its pages while it is swapped out
    layout: ImageLayout = field(default=NO_IMAGES, repr=False)  # of its prompt

    @property
    def prefix_tokens(self) -> abc.Sequence[int]:
        """The tokens as keys of cached prefixes: those of an image are hashes of it."""
        return self.layout.make_prefix_tokens(self.tokens)


@dataclass(eq=False)
class Request:
    """A prompt, `num_choices` sequences that continue it, and where they are in the schedule."""

    number: int  # in the order of arrival
    num_prompt_tokens: int
    max_new_tokens: int  # 0: the prompt is embedded
    num_choices: int = 1  # sequences that continue the prompt
    priority: int = 0
    tenant: str = ""
    arrival_ms: int = 0
    adapter: Adapter | None = field(default=None, repr=False)  # None: the model alone

    # ---- counts of the scheduler, which needs no more than these
    num_computed_tokens: int = 0  # of the prompt only: prefilled, or taken from a prefix
    num_output_tokens: int = 0  # of each unfinished sequence
    matched_version: int | None = None  # version of the prefixes at the last match; None: unmatched
    prefill_started: bool = False
    repetition: Repetition | None = None  # second pass: scores the prompt's KV rows for pruning
    checkpoint_positions: tuple[int, ...] = ()  # prompt lengths at which a chunk must end
    shared_slots: Ints = field(default_factory=lambda: NO_SLOTS)  # shared with cached prefixes
    num_finished: int = 0  # finished sequences
    is_swapped_out: bool = False
    is_active: bool = False  # its sequences count towards max_sequences
    store_deadline_ms: int = 0  # when it stops waiting for a store; 0: it does not wait
    layout: ImageLayout = field(default=NO_IMAGES, repr=False)  # of the prompt
    images: PromptImages | None = None  # encodes the layout's images, and keeps their features

    # ---- for the engine's thread
    run_chunk: ChunkForward = compute_last_logits
    prompt_logits: Tensor | None = None  # after the prompt, until the second pass ends
    sequences: list[Sequence] = field(default_factory=list)  # unfinished; prefill uses the first
    samplers: list[Sampler] = field(default_factory=list)  # by choice
    outputs: list[Output] = field(default_factory=list)  # by choice
    logprobs: int = 0
    salt: str = ""  # prefixes are shared among equal salts
    namespace: PrefixNamespace | None = field(default=None, repr=False)  # None: no prefixes
    branch_points: list[int] = field(default_factory=list)  # where other prompts may diverge
    restored_range: range = range(0)  # prompt tokens restored from a store
    last_token_time: float = 0.0  # monotonic seconds; before the first token, the time of arrival
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def is_embedding(self) -> bool:
        """Whether the prompt is embedded; then all its tokens are computed, without prefixes."""
        return self.max_new_tokens == 0

    @property
    def num_tokens_left(self) -> int:
        """Tokens of the prompt, and of its second pass, until the first token is sampled."""
        num_repeated = 0 if self.repetition is None else self.repetition.num_tokens_left
        return self.num_prompt_tokens - self.num_computed_tokens + num_repeated

    @property
    def num_fork_tokens(self) -> int:
        """The most tokens that the second pass adds to a fork of the cache; 0: it has ended."""
        return 0 if self.repetition is None else self.repetition.max_fork_tokens

    @property
    def is_decoding(self) -> bool:
        return not self.num_tokens_left

    @property
    def is_computed(self) -> bool:
        """Whether the whole prompt is cached; its second pass may follow."""
        return self.num_computed_tokens == self.num_prompt_tokens

    def find_unencoded_image(self, end: int) -> ProcessedImage | None:
        """Return the first image that must be encoded before the prompt is prefilled to `end`."""
        if self.images is None:
            return None
        return self.images.find_unencoded(self.num_computed_tokens, end)

    @property
    def num_sequences(self) -> int:
        """Unfinished sequences, also those without a cache yet."""
        return self.num_choices - self.num_finished

    @property
    def holds_match(self) -> bool:
        """Whether a waiting request holds pages of a matched prefix."""
        return self.matched_version is not None and not self.is_swapped_out

    def compute_priority(self, now_ms: int) -> int:
        """Return the priority, plus 1 for every `AGING_MS` of waiting."""
        return self.priority + (now_ms - self.arrival_ms) // AGING_MS

    def set_match(
        self, version: int | None = None, num_cached: int = 0, checkpoints: tuple[int, ...] = ()
    ) -> None:
        """Set how many tokens of the prompt are cached, and where later chunks must end.

        Without arguments, forget the match: its pages were released.
        """
        self.matched_version, self.num_computed_tokens = version, num_cached
        self.checkpoint_positions = checkpoints
        if version is None:
            self.shared_slots = NO_SLOTS

    def add_choices(
        self,
        tokens: list[int],
        tokenizer: Any,
        sampling: Sampling,
        conditions: StopConditions,
    ) -> None:
        """Make the sequence, the sampler and the output of each continuation."""
        for choice in range(self.num_choices):
            sequence = Sequence([*tokens], choice, self.adapter, layout=self.layout)
            self.sequences.append(sequence)
            self.outputs.append(Output(tokenizer, conditions, sequence.tokens))
            matcher = make_matcher(sampling.grammar, tokenizer, conditions.end_tokens)
            self.samplers.append(Sampler(sampling.derive_choice(choice), len(tokens), matcher))

    def free(self) -> None:
        """Drop images and caches of an ended request, which the last action may keep alive."""
        self.repetition = self.images = self.namespace = None
        self.layout, self.run_chunk = NO_IMAGES, compute_last_logits
        for sequence in self.sequences:
            sequence.layout = NO_IMAGES

    def flush_outputs(self) -> dict[int, str]:
        """Return what the detokenizers of unfinished sequences held back, by choice.

        A tokenizer may refuse tokens that the model can generate: their text is lost.
        """
        texts = dict[int, str]()
        unfinished = {sequence.choice for sequence in self.sequences}
        for choice, output in enumerate(self.outputs):
            if choice in unfinished and output.num_generated:
                with suppress(Exception):
                    texts[choice] = output.detokenizer.flush()
        return texts


def check_texts(**texts: str) -> None:
    """Raise unless these arguments of `submit` are texts that UTF-8 can encode."""
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r}: a text is needed")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}={value!r}: a text that UTF-8 can encode is needed") from None


def check_counts(**counts: int) -> None:
    """Raise unless these arguments of `submit` are whole numbers in range."""
    for name, value in counts.items():
        if not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: a whole number is needed")
    for name, minimum in (("n", 1), ("logprobs", 0)):
        if counts.get(name, minimum) < minimum:
            raise ValueError(f"{name}={counts[name]}: {minimum} or more is needed")


def sample_tokens(
    sequences: abc.Sequence[tuple[Request, Sequence]],
    logits: Tensor,
    drafts: abc.Sequence[list[int]],
) -> list[list[SampledToken | Exception]]:
    """Sample the next tokens of each sequence from its logits [sequences, T, vocabulary].

    They are one token, and another one after each draft that is accepted.
    """
    tokens: list[list[SampledToken | Exception]] = [[] for _ in sequences]
    texts = [sequence.tokens for _, sequence in sequences]
    indices = list(range(len(sequences)))  # of the sequences whose drafts are accepted so far
    for column in range(logits.shape[1]):
        rows = logits[:, column] if len(indices) == len(sequences) else logits[indices, column]
        sampled = _sample_each(
            [sequences[index] for index in indices], [texts[index] for index in indices], rows
        )
        for index, token in zip(indices, sampled, strict=True):
            tokens[index].append(token)
        indices = [i for i in indices if is_accepted(tokens[i][column], drafts[i][column:])]
        if not indices:
            break
        for index in indices:
            if column == 0:  # a copy: drafts are not tokens of the sequence yet
                texts[index] = [*texts[index]]
            texts[index].append(drafts[index][column])
    return tokens


def is_accepted(token: SampledToken | Exception, drafts: abc.Sequence[int]) -> bool:
    """Return whether a sampled token is the first of these drafts."""
    return isinstance(token, SampledToken) and bool(drafts) and drafts[0] == token.token


def _sample_each(
    sequences: abc.Sequence[tuple[Request, Sequence]],
    texts: abc.Sequence[abc.Sequence[int]],
    logits: Tensor,
) -> list[SampledToken | Exception]:
    """Sample the next token of each sequence in one batch; if that fails, one by one.

    `texts` are the token ids so far, with the drafts accepted in this step.
    """

    def sample(rows: slice) -> list[SampledToken]:
        return sample_batch(
            logits[rows],
            [request.samplers[sequence.choice] for request, sequence in sequences[rows]],
            texts[rows],
            [request.logprobs for request, _ in sequences[rows]],
        )

    try:
        return [*sample(slice(None))]
    except Exception:
        tokens: list[SampledToken | Exception] = []
        for row in range(len(sequences)):
            try:
                tokens += sample(slice(row, row + 1))
            except Exception as error:
                tokens.append(error)
        return tokens


def clear_traceback_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and its causes: a stored error would keep their caches alive."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
