"""A conversation over one cache: no token of it is prefilled twice.

    tokens   |--- prompt ---|-- reply --|--- prompt ---|-- reply --|
    cache    |-------------------------------------------------|       a prefix of the tokens

A reply belongs to the conversation as far as its steps were iterated; stopping early ends it
there. A reply that was never iterated is computed to its end before the session's next operation,
so no message is lost.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, Unpack

from torch import nn

from kvant.attention import explain
from kvant.cache import files
from kvant.errors import PromptError, RewindError
from kvant.generation.conversation import (
    PromptFormat,
    Transcript,
    Turn,
    convert_errors,
    join_turns,
)
from kvant.generation.decoder import (
    LogitsFunction,
    PrefillProgress,
    count_shared_prefix,
    make_decoder,
)
from kvant.generation.loop import GenerationLoop, GenerationOptions, Output, Step
from kvant.generation.settings import SamplingOptions, make_sampling
from kvant.generation.strategy import SequenceCache
from kvant.platform.sizes import format_count, format_size
from kvant.recipes import AnySpec
from kvant.spec import describe_spec


class StepStream(Iterator[Step]):
    """The steps of a reply; dropping or closing the iterator ends the reply."""

    def __init__(
        self, steps: Generator[Step, None, None], on_start: Callable[[StepStream], None]
    ) -> None:
        """Call `on_start` when the first step is requested."""
        self._steps = steps
        self._on_start: Callable[[StepStream], None] | None = on_start
        self._ready: deque[Step] = deque()  # computed by `finish`, not yet returned

    def __next__(self) -> Step:
        if self._on_start is not None:
            self._on_start(self)
            self._on_start = None
        return self._ready.popleft() if self._ready else next(self._steps)

    def finish(self) -> None:
        """Compute the remaining steps; they can still be iterated."""
        self._ready.extend(self._steps)

    def close(self) -> None:
        """End the reply; do nothing if the generator itself calls this."""
        if getgeneratorstate(self._steps) != GEN_RUNNING:
            self._steps.close()


class Session:
    """A conversation with a model; each `send` re-uses everything computed before.

    >>> session = kvant.Session(model, tokenizer, "affine8")
    >>> for message in ("import ", "def "):
    ...     reply = "".join(step.text for step in session.send(message, max_new_tokens=4))
    >>> len(session.turns)
    2
    """

    def __init__(
        self,
        model: nn.Module | LogitsFunction,
        tokenizer: Any,
        kv_cache: AnySpec | SequenceCache = "raw",
        *,
        system: str | None = None,
        template: bool = True,
        **options: Unpack[GenerationOptions],
    ) -> None:
        """Create a conversation; `template=False` makes its messages one continuous text.

        The other options are those of `kvant.generate`; `send` can override those of sampling. With
        `prefixes` the session may replace its cache before each message by one that holds a longer
        prefix.
        """
        self.loop = GenerationLoop(model, tokenizer, kv_cache, **options)
        self.tokenizer = tokenizer
        self.prompt_format = PromptFormat(tokenizer, system, template)
        self._tokens: list[int] = []  # tokens up to the end of the last turn
        self._turns: list[Turn] = []
        self._unread_stream: StepStream | None = None  # a reply of which no step was iterated
        self._stream_ref: weakref.ref[StepStream] | None = None  # dropping the stream ends it

    @property
    def cache(self) -> SequenceCache:
        return self.loop.prefiller.cache

    @property
    def tokens(self) -> list[int]:
        """All tokens of the conversation; the cache holds a prefix of them."""
        self._finish_stream()
        return list(self._tokens)

    @property
    def turns(self) -> list[Turn]:
        self._finish_stream()
        return list(self._turns)

    def send(
        self,
        message: str | Sequence[int],
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        progress: PrefillProgress | None = None,
        branch_points: Sequence[int] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> StepStream:
        """Stream the reply to a message, or to tokens that are appended as they are.

        `branch_points` are lengths at which other prompts may differ from this one. Prefixes store
        checkpoints there; for messages the points are found automatically.
        Invalid arguments raise here, before the first step, and change nothing.
        The reply is computed as its steps are iterated. If no step was iterated, the next call of
        any other method computes the whole reply, whose steps can still be iterated then.
        """
        self._finish_stream()
        prompt, text = self._make_prompt(message)
        if self.loop.prefiller.prefixes is not None and isinstance(message, str):
            branch_points = branch_points or self.prompt_format.find_branch_points(
                self._turns, text, prompt
            )
        steps = self.loop.start(
            prompt,
            make_sampling(sampling, self.loop.sampling),
            max_new_tokens=max_new_tokens,
            stop=stop,
            ignore_end=ignore_end,
            progress=progress,
            branch_points=branch_points,
            commit=partial(self._add_turn, text),
        )
        self._unread_stream = stream = StepStream(steps, self._forget_unread)
        self._stream_ref = weakref.ref(stream)
        return stream

    def read(
        self, message: str | Sequence[int], *, progress: PrefillProgress | None = None
    ) -> None:
        """Prefill text or tokens that a later message continues; no reply is generated."""
        self._finish_stream()
        if self.prompt_format.uses_template:
            raise ValueError("a chat template needs messages with replies: use send")
        prompt, text = self._make_prompt(message)
        num_tokens = len(self._tokens)
        if len(prompt) == num_tokens:
            raise PromptError("the text has no tokens: there is nothing to read")
        self.loop.stop_conditions.check_prompt(prompt)
        turn = Turn(text, "", num_tokens, tuple(prompt[num_tokens:]), len(prompt))
        try:
            self.loop.prefiller.prefill(prompt, progress)
            self._turns, self._tokens = [*self._turns, turn], prompt
        finally:
            self.loop.prefiller.settle(self._tokens)

    def rewind(self, to: int) -> None:
        """Rewind to length `to`: a reply may be cut, a message is removed as a whole."""
        self._finish_stream()
        turns = self._truncate_turns(to)
        tokens = join_turns(turns)
        self.loop.prefiller.align_cache(tokens)
        self._turns, self._tokens = turns, tokens

    def reset(self) -> None:
        """Start a new conversation; discard an unread reply without computing it."""
        self._unread_stream = None
        self._finish_stream()
        self.loop.prefiller.reset()
        self._turns, self._tokens = [], []

    def fork(self) -> Session:
        """Return an independent copy of the conversation."""
        self._finish_stream()
        copy = Session.__new__(Session)
        copy.__dict__.update(self.__dict__)
        copy.loop = self.loop.fork()
        copy._tokens, copy._turns = list(self._tokens), list(self._turns)
        return copy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation and its cache to a file, which `load` continues."""
        self._finish_stream()
        model = self.loop.prefiller.decoder.fingerprint
        transcript = Transcript(
            tuple(self._turns), self.prompt_format.system, self.prompt_format.uses_template, model
        )
        files.save(self.cache, path, about=transcript.to_header())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module | LogitsFunction,
        tokenizer: Any,
        *,
        backend: str | None = None,
    ) -> Session:
        """Load a conversation from a file; `model` must be the one that wrote it."""
        saved_cache = files.read(path)
        transcript = Transcript.from_header(path, saved_cache.about)
        transcript.check_model(path, make_decoder(model).fingerprint)
        with convert_errors(path):
            session = cls(
                model, tokenizer, saved_cache.spec, template=transcript.template, backend=backend
            )
        session._load_conversation(path, saved_cache)
        return session

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Replace this conversation by one from a file, with the file's spec."""
        self._finish_stream()
        self._load_conversation(path, files.read(path))

    def __repr__(self) -> str:
        turns = format_count(len(self._turns), "turn")
        contents = f"{turns}, {format_count(len(self._tokens), 'token')}"
        spec, size = describe_spec(self.cache.spec), format_size(self.cache.nbytes)
        return f"Session({spec}: {contents}, {size})"

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the cache and the share of prompt tokens it already held."""
        self._finish_stream()
        prefiller, prefixes = self.loop.prefiller, self.loop.prefiller.prefixes
        mismatch = None if prefixes is None else prefixes.describe_mismatch(self.tokenizer)
        return self.cache.stats() | {
            "tokens": len(self._tokens),
            "tokens_asked": prefiller.num_prompt_tokens,
            "tokens_reused": prefiller.num_cached_tokens,
            "tokens_restored": prefiller.num_restored_tokens,
            "hit_rate": prefiller.num_cached_tokens / max(prefiller.num_prompt_tokens, 1),
            "drafts": self.loop.num_drafts,
            "drafts_accepted": self.loop.num_accepted_drafts,
            "prefix_lost": mismatch,
        }

    def _load_conversation(
        self, path: str | os.PathLike[str], saved_cache: files.SavedCache
    ) -> None:
        prefiller, transcript = self.loop.prefiller, Transcript.from_header(path, saved_cache.about)
        transcript.check_model(path, prefiller.decoder.fingerprint)
        with convert_errors(path):
            cache = prefiller.decoder.make_cache(saved_cache.spec)
            cache.backend = prefiller.cache.backend
            cache.restore(saved_cache.snapshot)
            tokens = transcript.get_tokens(cache.length, prefiller.decoder.vocab_size)
            self.loop.replace_cache(cache, tokens[: cache.length])
        self.prompt_format = PromptFormat(self.tokenizer, transcript.system, transcript.template)
        self._tokens, self._turns = tokens, list(transcript.turns)

    def _truncate_turns(self, to: int) -> list[Turn]:
        """Return the turns cut at length `to`, of several possible cuts the newest."""
        if to == 0:
            return []
        for index in reversed(range(len(self._turns))):
            turn, earlier_turns = self._turns[index], self._turns[:index]
            if to == turn.end or turn.begin < to < turn.end:
                cut_turn = replace(turn, tokens=turn.tokens[: to - turn.shared])
                reply_tokens = join_turns([*earlier_turns, cut_turn])[turn.begin :]
                reply = turn.reply
                if to < turn.end:
                    reply = self.tokenizer.decode(reply_tokens, skip_special_tokens=True)
                return [*earlier_turns, replace(cut_turn, reply=reply)]
        ends = [0, *(turn.end for turn in self._turns)]
        raise RewindError(
            f"length {to}: replies can be cut short, but a message is removed as a whole; the "
            f"turns end at {ends}"
        )

    def _make_prompt(self, message: str | Sequence[int]) -> tuple[list[int], str]:
        """Return all tokens before the reply, and the message's text ("" for tokens)."""
        if isinstance(message, str):
            return self.prompt_format.make_prompt(self._turns, self._tokens, message), message
        if self.prompt_format.uses_template:
            raise ValueError("tokens as a message: a chat template takes text (or template=False)")
        return [*self._tokens, *(int(token) for token in message)], ""

    def _add_turn(self, message: str, output: Output) -> list[int]:
        """Append the turn as far as its reply was generated; without a reply there is no turn."""
        if output.num_generated:
            shared = count_shared_prefix(self._tokens, output.tokens[: output.prompt_length])
            tokens, text = tuple(output.tokens[shared:]), output.text + output.detokenizer.flush()
            self._turns.append(Turn(message, text, shared, tokens, output.prompt_length))
            self._tokens = output.tokens
        return self._tokens

    def _forget_unread(self, stream: StepStream) -> None:
        """Let go of a stream that is iterated from now on."""
        if self._unread_stream is stream:
            self._unread_stream = None

    def _finish_stream(self) -> None:
        """Compute a reply that was never iterated; end one that was."""
        unread, self._unread_stream = self._unread_stream, None
        if unread is not None:
            unread.finish()
        stream = None if self._stream_ref is None else self._stream_ref()
        if stream is not None:
            stream.close()


@explain.register
def _(session: Session) -> Any:
    """Explain which backend reads a session's cache."""
    return explain(session.cache)
