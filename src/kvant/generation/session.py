"""A conversation over one cache: no token of it is prefilled twice.

    tokens   |--- prompt ---|-- reply --|--- prompt ---|-- reply --|
    cache    |-------------------------------------------------|       a prefix of the tokens

A reply belongs to the conversation as far as its steps were iterated; stopping early ends it
there. A reply that was never iterated is computed to its end before the session's next operation,
so no message is lost.

The header of a saved cache holds the transcript as JSON. Files are not trusted: missing fields,
another model or values that do not fit together raise an error with the file's name, before
anything changes.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, Unpack

from torch import nn

from kvant.attention import explain
from kvant.cache import files
from kvant.errors import CacheError, CacheFileError, PromptError, RewindError
from kvant.generation.conversation import (
    Messages,
    describe_prefix_miss,
    encode_messages,
    find_branch_points,
)
from kvant.generation.decoder import LogitsFunction, make_decoder
from kvant.generation.loop import GenerationLoop, GenerationOptions, Output, Step
from kvant.generation.prefiller import PrefillProgress
from kvant.generation.settings import SamplingOptions, make_sampling
from kvant.generation.strategy import SequenceCache
from kvant.platform.sizes import format_count, format_size
from kvant.prefixes.tree import count_shared_prefix
from kvant.recipes import AnySpec
from kvant.spec import describe_spec

HEADER_KEY = "session"


@dataclass(frozen=True)
class Turn:
    """A message, its reply, and all tokens up to the end of the reply.

        0            shared          begin         end
        |-- last turn --|--- prompt ---|--- reply ---|
                        |---------- tokens ----------|

    The first `shared` tokens are those of the previous turn: a template may render past messages
    in another way than new ones.
    """

    message: str
    reply: str
    shared: int
    tokens: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        return self.shared + len(self.tokens)


@dataclass(frozen=True)
class Transcript:
    """The turns of a conversation, and how they are rendered as tokens.

    Messages have roles, which the chat template renders. Without a template they are one continuous
    text: a message follows the previous tokens directly.
    """

    turns: tuple[Turn, ...]
    system: str | None
    template: bool
    model: str | None = None  # fingerprint of the model that wrote a file, if known

    @classmethod
    def from_header(cls, path: str | os.PathLike[str], header: Mapping[str, Any]) -> Transcript:
        if HEADER_KEY not in header:
            raise CacheFileError(f"{path}: a cache without a conversation: kvant.load reads it")
        with convert_errors(path):
            fields = header[HEADER_KEY]
            turns = [Turn(**turn | {"tokens": tuple(turn["tokens"])}) for turn in fields["turns"]]
            transcript = cls(tuple(turns), fields["system"], fields["template"], fields["model"])
            transcript._check_fields()
        return transcript

    @cached_property
    def tokens(self) -> list[int]:
        """All tokens up to the end of the last turn."""
        tokens: list[int] = []
        for turn in self.turns:
            tokens[turn.shared :] = turn.tokens
        return tokens

    @property
    def last_prompt(self) -> Messages | None:
        """The messages before the last reply; None without a template."""
        if not (self.turns and self.template):
            return None
        return replace(self, turns=self.turns[:-1])._make_messages(self.turns[-1].message)

    def adapt_to(self, tokenizer: Any) -> Transcript:
        """Return this without a template if the tokenizer has none."""
        has_template = getattr(tokenizer, "chat_template", None) is not None
        return replace(self, template=self.template and has_template)

    def make_prompt(self, tokenizer: Any, message: str | Sequence[int]) -> list[int]:
        """Return all tokens before the reply to a message, or to tokens as they are."""
        if not isinstance(message, str):
            if self.template:
                raise ValueError(
                    "tokens as a message: a chat template takes text (or template=False)"
                )
            return [*self.tokens, *(int(token) for token in message)]
        if self.template:
            return encode_messages(tokenizer, self._make_messages(message))
        if self.tokens:
            return [*self.tokens, *tokenizer.encode(message, add_special_tokens=False)]
        return list(tokenizer.encode((self.system or "") + message))

    def find_branch_points(self, tokenizer: Any, message: str, prompt: Sequence[int]) -> list[int]:
        """Return the lengths of a prompt at which other conversations may differ."""
        if self.template:
            return find_branch_points(tokenizer, self._make_messages(message), prompt)
        return [self.turns[-1].end] if self.turns else []

    def add_turn(self, message: str, reply: str, tokens: list[int], begin: int) -> Transcript:
        """Append a turn; `tokens` are all tokens, those of the reply from `begin` on."""
        shared = count_shared_prefix(self.tokens, tokens[:begin])
        turn = Turn(message, reply, shared, tuple(tokens[shared:]), begin)
        return replace(self, turns=(*self.turns, turn))

    def truncate(self, tokenizer: Any, to: int) -> Transcript:
        """Cut the turns at length `to`, of several possible cuts at the newest."""
        if to == 0:
            return replace(self, turns=())
        for index in reversed(range(len(self.turns))):
            turn, earlier_turns = self.turns[index], self.turns[:index]
            if to == turn.end or turn.begin < to < turn.end:
                cut_turn = replace(turn, tokens=turn.tokens[: to - turn.shared])
                cut = replace(self, turns=(*earlier_turns, cut_turn))
                if to == turn.end:
                    return cut
                reply = tokenizer.decode(cut.tokens[turn.begin :], skip_special_tokens=True)
                return replace(self, turns=(*earlier_turns, replace(cut_turn, reply=reply)))
        ends = [0, *(turn.end for turn in self.turns)]
        raise RewindError(
            f"length {to}: replies can be cut short, but a message is removed as a whole; the "
            f"turns end at {ends}"
        )

    def check_model(self, path: str | os.PathLike[str], model: str | None) -> None:
        if None not in (self.model, model) and self.model != model:
            raise CacheFileError(
                f"{path}: a conversation with another model, or with this one in another dtype: "
                "load the model that wrote it"
            )

    def check_tokens(self, cache_length: int, vocab_size: int | None) -> None:
        """Raise if the tokens do not fit the cache's length or the vocabulary."""
        if cache_length > len(self.tokens):
            raise ValueError(f"{cache_length} tokens in the cache, {len(self.tokens)} in the turns")
        if vocab_size is not None and max(self.tokens, default=0) >= vocab_size:
            raise ValueError(f"token {max(self.tokens)} for a vocabulary of {vocab_size}")

    def _make_messages(self, message: str) -> Messages:
        pairs = [] if self.system is None else [("system", self.system)]
        for turn in self.turns:
            pairs += [("user", turn.message), ("assistant", turn.reply)]
        pairs.append(("user", message))
        return Messages([{"role": role, "content": text} for role, text in pairs])

    def _check_fields(self) -> None:
        if not isinstance(self.template, bool):
            raise ValueError(f"template={self.template!r}: true or false is needed")
        if not all(isinstance(text, str | None) for text in (self.system, self.model)):
            raise ValueError("a system message or a model that is no text")
        previous_end = 0
        for turn in self.turns:
            numbers = (turn.shared, turn.begin, *turn.tokens)
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError("a turn whose tokens or counts are not whole numbers from 0 on")
            if not (turn.shared <= previous_end and turn.begin <= turn.end):
                raise ValueError("a turn that does not fit after the previous one")
            if not isinstance(turn.message, str) or not isinstance(turn.reply, str):
                raise ValueError("a turn that is no text")
            previous_end = turn.end


@contextmanager
def convert_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise errors about the contents of a file as `CacheFileError` with its name."""
    try:
        yield
    except CacheFileError:
        raise
    except (CacheError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CacheFileError(f"{path}: not a conversation to continue: {error}") from error


class StepStream(Iterator[Step]):
    """The steps of a reply; dropping or closing the iterator ends the reply."""

    def __init__(self, steps: Generator[Step, None, None], unread: set[StepStream]) -> None:
        """Belong to `unread` until the first step is requested."""
        self._steps = steps
        self._unread = unread
        self._ready: deque[Step] = deque()  # computed by `finish`, not yet returned
        unread.add(self)

    def __next__(self) -> Step:
        self._unread.discard(self)
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
        self.transcript = Transcript((), system, template).adapt_to(tokenizer)
        self._unread: set[StepStream] = set()  # the reply of which no step was iterated, if any
        self._stream_ref: weakref.ref[StepStream] | None = None  # dropping the stream ends it

    @property
    def cache(self) -> SequenceCache:
        return self.loop.prefiller.cache

    @property
    def tokens(self) -> list[int]:
        """All tokens of the conversation; the cache holds a prefix of them."""
        self._finish_stream()
        return list(self.transcript.tokens)

    @property
    def turns(self) -> list[Turn]:
        self._finish_stream()
        return list(self.transcript.turns)

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
        prompt = self.transcript.make_prompt(self.tokenizer, message)
        if self.loop.prefiller.prefixes is not None and isinstance(message, str):
            branch_points = branch_points or self.transcript.find_branch_points(
                self.tokenizer, message, prompt
            )

        def add_turn(output: Output) -> list[int]:
            """Append the turn as far as its reply was generated; without a reply there is none."""
            if output.num_generated:
                text = message if isinstance(message, str) else ""
                reply = output.text + output.detokenizer.flush()
                self.transcript = self.transcript.add_turn(
                    text, reply, output.tokens, output.prompt_length
                )
            return self.transcript.tokens

        steps = self.loop.start(
            prompt,
            make_sampling(sampling, self.loop.sampling),
            max_new_tokens=max_new_tokens,
            stop=stop,
            ignore_end=ignore_end,
            progress=progress,
            branch_points=branch_points,
            commit=add_turn,
        )
        stream = StepStream(steps, self._unread)
        self._stream_ref = weakref.ref(stream)
        return stream

    def read(
        self, message: str | Sequence[int], *, progress: PrefillProgress | None = None
    ) -> None:
        """Prefill text or tokens that a later message continues; no reply is generated."""
        self._finish_stream()
        if self.transcript.template:
            raise ValueError("a chat template needs messages with replies: use send")
        prompt = self.transcript.make_prompt(self.tokenizer, message)
        if len(prompt) == len(self.transcript.tokens):
            raise PromptError("the text has no tokens: there is nothing to read")
        self.loop.stop_conditions.check_prompt(prompt)
        try:
            self.loop.prefiller.prefill(prompt, progress)
            text = message if isinstance(message, str) else ""
            self.transcript = self.transcript.add_turn(text, "", prompt, len(prompt))
        finally:
            self.loop.prefiller.settle(self.transcript.tokens)

    def rewind(self, to: int) -> None:
        """Rewind to length `to`: a reply may be cut, a message is removed as a whole."""
        self._finish_stream()
        transcript = self.transcript.truncate(self.tokenizer, to)
        self.loop.prefiller.align_cache(transcript.tokens)
        self.transcript = transcript

    def reset(self) -> None:
        """Start a new conversation; discard an unread reply without computing it."""
        self._unread.clear()
        self._finish_stream()
        self.loop.prefiller.reset()
        self.transcript = replace(self.transcript, turns=())

    def fork(self) -> Session:
        """Return an independent copy of the conversation."""
        self._finish_stream()
        copy = Session.__new__(Session)
        copy.__dict__.update(self.__dict__)
        copy.loop, copy._unread = self.loop.fork(), set()
        return copy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation and its cache to a file, which `load` continues."""
        self._finish_stream()
        model = self.loop.prefiller.decoder.fingerprint
        transcript = replace(self.transcript, model=model)
        files.save(self.cache, path, about={HEADER_KEY: asdict(transcript)})

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
        session.transcript = _restore(session.loop, path, saved_cache)
        return session

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Replace this conversation by one from a file, with the file's spec."""
        self._finish_stream()
        self.transcript = _restore(self.loop, path, files.read(path))

    def __repr__(self) -> str:
        turns = format_count(len(self.transcript.turns), "turn")
        contents = f"{turns}, {format_count(len(self.transcript.tokens), 'token')}"
        spec, size = describe_spec(self.cache.spec), format_size(self.cache.nbytes)
        return f"Session({spec}: {contents}, {size})"

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the cache and the share of prompt tokens it already held."""
        self._finish_stream()
        prefiller, prefixes = self.loop.prefiller, self.loop.prefiller.prefixes
        miss = None if prefixes is None else prefixes.last_miss
        return self.cache.stats() | {
            "tokens": len(self.transcript.tokens),
            "tokens_asked": prefiller.num_prompt_tokens,
            "tokens_reused": prefiller.num_cached_tokens,
            "tokens_restored": prefiller.num_restored_tokens,
            "hit_rate": prefiller.num_cached_tokens / max(prefiller.num_prompt_tokens, 1),
            "drafts": self.loop.num_drafts,
            "drafts_accepted": self.loop.num_accepted_drafts,
            "prefix_lost": None
            if miss is None
            else describe_prefix_miss(self.tokenizer, self.transcript.last_prompt, miss),
        }

    def _finish_stream(self) -> None:
        """Compute a reply that was never iterated; end one that was."""
        while self._unread:
            self._unread.pop().finish()
        stream = None if self._stream_ref is None else self._stream_ref()
        if stream is not None:
            stream.close()


def _restore(
    loop: GenerationLoop, path: str | os.PathLike[str], saved_cache: files.SavedCache
) -> Transcript:
    """Replace a loop's cache by that of a file; return the file's conversation."""
    decoder, transcript = loop.prefiller.decoder, Transcript.from_header(path, saved_cache.about)
    transcript.check_model(path, decoder.fingerprint)
    with convert_errors(path):
        cache = decoder.make_cache(saved_cache.spec)
        cache.backend = loop.prefiller.cache.backend
        cache.restore(saved_cache.snapshot)
        transcript.check_tokens(cache.length, decoder.vocab_size)
        loop.replace_cache(cache, transcript.tokens[: cache.length])
    return transcript.adapt_to(loop.tokenizer)


@explain.register
def _(session: Session) -> Any:
    """Explain which backend reads a session's cache."""
    return explain(session.cache)
