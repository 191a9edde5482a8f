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
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, Unpack

from torch import nn

from kvant.attention import explain
from kvant.cache import files
from kvant.errors import CacheError, PromptError, RewindError
from kvant.generation.conversation import (
    Messages,
    describe_prefix_miss,
    parse_messages,
)
from kvant.generation.decoder import LogitsFunction, make_decoder
from kvant.generation.loop import GenerationLoop, GenerationOptions, Output, Step
from kvant.generation.prefiller import PrefillProgress
from kvant.generation.settings import SamplingOptions, make_sampling
from kvant.generation.strategy import SequenceCache
from kvant.generation.transcript import HEADER_KEY, Transcript, Turn, convert_errors
from kvant.platform.sizes import format_count, format_size
from kvant.recipes import AnySpec
from kvant.spec import describe_spec
from kvant.vision import ImageSource, ProcessedImage
from kvant.vision.processing import list_images, make_content


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
        self.tokenizer = self.loop.tokenizer
        self.transcript = Transcript((), system, template).adapt_to(self.tokenizer)
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
        images: Sequence[ImageSource | ProcessedImage] = (),
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        progress: PrefillProgress | None = None,
        branch_points: Sequence[int] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> StepStream:
        """Stream the reply to a message, or to tokens that are appended as they are.

        `images` come before the text of the message: bytes of files, or images of Pillow.
        `branch_points` are lengths at which other prompts may differ from this one. Prefixes store
        checkpoints there; for messages the points are found automatically.
        Invalid arguments raise here, before the first step, and change nothing.
        The reply is computed as its steps are iterated. If no step was iterated, the next call of
        any other method computes the whole reply, whose steps can still be iterated then.
        """
        self._finish_stream()
        processed = self.process_images(images, message)
        prompt = self.transcript.make_prompt(self.tokenizer, message, processed)
        located = None
        if isinstance(message, str) and (processed or self.transcript.has_images):
            messages = self.transcript.make_messages(message, processed)
            located = self.loop.locate_images(messages, prompt)
        if self.loop.prefiller.prefixes is not None and isinstance(message, str):
            branch_points = branch_points or self.transcript.find_branch_points(
                self.tokenizer, message, prompt, processed
            )

        def add_turn(output: Output) -> list[int]:
            """Append the turn as far as its reply was generated; without a reply there is none."""
            if output.num_generated:
                text = message if isinstance(message, str) else ""
                reply = output.text + output.detokenizer.flush()
                self.transcript = self.transcript.add_turn(
                    text, reply, output.tokens, output.prompt_length, processed
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
            images=located,
            commit=add_turn,
        )
        stream = StepStream(steps, self._unread)
        self._stream_ref = weakref.ref(stream)
        return stream

    def process_images(
        self, images: Sequence[ImageSource | ProcessedImage], message: str | Sequence[int] = ""
    ) -> list[ProcessedImage]:
        """Return images as `send` accepts them, processed for the model."""
        if not images:
            return []
        if not (isinstance(message, str) and self.transcript.template):
            raise PromptError("images need a message as text, and a model with a chat template")
        prompt = Messages([{"role": "user", "content": make_content(message, images)}])
        processed = parse_messages(self.loop.process_images(prompt))
        return [] if processed is None else list_images(processed.messages)

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
        self._return_to(self.transcript.truncate(self.tokenizer, to))

    def rewind_turns(self, count: int) -> None:
        """Remove the newest `count` turns: messages with their replies."""
        self._finish_stream()
        turns = self.transcript.turns
        if not 0 <= count <= len(turns):
            raise RewindError(f"{count} turns to remove, of {len(turns)}")
        self._return_to(replace(self.transcript, turns=turns[: len(turns) - count]))

    def _return_to(self, transcript: Transcript) -> None:
        """Return to an earlier transcript, and rewind the cache to its tokens."""
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
        if self.transcript.has_images:
            raise CacheError(
                "a conversation with images cannot be saved: a file has no place for them; rewind "
                "to a turn before the first image"
            )
        model = self.loop.prefiller.decoder.fingerprint
        transcript = replace(self.transcript, model=model)
        files.save(self.cache, path, about={HEADER_KEY: transcript.to_header()})

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
        decoder = make_decoder(model)
        saved_cache = files.read(path, device=decoder.device)
        transcript = Transcript.from_header(path, saved_cache.about)
        transcript.check_model(path, decoder.fingerprint)
        with convert_errors(path):
            session = cls(
                model, tokenizer, saved_cache.spec, template=transcript.template, backend=backend
            )
        session.transcript = _restore(session.loop, path, saved_cache)
        return session

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Replace this conversation by one from a file, with the file's spec."""
        self._finish_stream()
        saved_cache = files.read(path, device=self.loop.prefiller.decoder.device)
        self.transcript = _restore(self.loop, path, saved_cache)

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
