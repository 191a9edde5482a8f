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
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from kvant.attention import explain
from kvant.cache import files
from kvant.errors import PromptError, RewindError
from kvant.generation.conversation import (
    Transcript,
    Turn,
    convert_errors,
    join_turns,
    make_prompt_format,
)
from kvant.generation.decoder import (
    Decoder,
    LogitsFunction,
    SequenceCache,
    TransformersDecoder,
    make_decoder,
)
from kvant.generation.drafters import Drafter, make_drafter
from kvant.generation.grammar import Grammar, compile_grammar
from kvant.generation.loop import GenerationLoop, Step, StepStream
from kvant.generation.prefill import Prefiller, PrefillProgress, count_shared_prefix
from kvant.generation.settings import Sampling, StopConditions
from kvant.generation.strategy import make_strategy
from kvant.hf import TransformersCache
from kvant.prefixes import Prefixes, PrefixNamespace
from kvant.recipes import AnySpec
from kvant.sizes import format_count, format_size
from kvant.spec import describe_spec


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
        max_context: int | None = None,
        prefill_chunk: int = 512,
        strategy: str = "always",
        threshold: int = 512,
        budget: int | str | None = None,
        draft: str | Drafter | nn.Module | LogitsFunction | None = None,
        max_drafts: int = 8,
        backend: str | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """Create a conversation; `template=False` makes its messages one continuous text.

        The other options are those of `kvant.generate`. With `prefixes` the session may replace its
        cache before each message by one that holds a longer prefix.
        """
        if tokenizer is None:
            raise TypeError("tokenizer=None: the model's own is needed, to encode and decode text")
        decoder = make_decoder(model)
        cache = decoder.make_cache(kv_cache, tokenizer)
        if backend is not None:
            cache.backend = backend
        if cache.length:
            raise ValueError(
                f"a cache of {cache.length} tokens: start with an empty one; kvant.Session keeps "
                "one cache over many turns"
            )
        cache_strategy = make_strategy(strategy, threshold, budget)
        if budget is not None and cache.spec.prunes:
            raise ValueError("a budget and a prune in the spec: use one of them to drop rows")
        self._prefixes = prefixes
        if prefixes is not None:
            if isinstance(kv_cache, TransformersCache):
                raise TypeError("a cache and prefixes: prefixes make their own cache; give a spec")
            if budget is not None:
                raise ValueError("a budget and prefixes: all prefixes are stored with one spec")
            if draft is not None:
                cache.ensure_slack(max_drafts + 1)  # the namespace depends on it
        namespace = self._make_prefix_namespace(decoder, cache)
        self.prefiller = Prefiller(decoder, cache, cache_strategy, prefill_chunk, namespace)
        self.tokenizer = tokenizer
        self.prompt_format = make_prompt_format(tokenizer, system, template)
        self.drafter = make_drafter(draft)
        self.stop_conditions = StopConditions(
            max_context=decoder.max_context if max_context is None else max_context,
            vocab_size=decoder.vocab_size,
            max_drafts=max_drafts,
        )
        self._tokens: list[int] = []  # tokens up to the end of the last turn
        self._turns: list[Turn] = []
        self._num_drafts = self._num_accepted_drafts = 0
        self._unread_stream: StepStream | None = None  # a reply of which no step was iterated
        self._stream_ref: weakref.ref[StepStream] | None = None  # dropping the stream ends it

    @property
    def cache(self) -> SequenceCache:
        return self.prefiller.cache

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
        progress: PrefillProgress | None = None,
        branch_points: Sequence[int] = (),
    ) -> StepStream:
        """Stream the reply to a message, or to tokens that are appended as they are.

        `branch_points` are lengths at which other prompts may differ from this one. Prefixes store
        checkpoints there; for messages the points are found automatically.
        Invalid arguments raise here, before the first step, and change nothing.
        The reply is computed as its steps are iterated. If no step was iterated, the next call of
        any other method computes the whole reply, whose steps can still be iterated then.
        """
        self._finish_stream()
        conditions = replace(
            self.stop_conditions,
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            end_tokens=frozenset() if ignore_end else self.prefiller.decoder.end_tokens,
        )
        sampling = Sampling(
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            seed,
            presence_penalty,
            frequency_penalty,
            grammar=compile_grammar(grammar, self.tokenizer, conditions.end_tokens),
        )
        prompt, text = self._make_prompt(message)
        if self._prefixes is not None and isinstance(message, str):
            branch_points = branch_points or self.prompt_format.find_branch_points(
                self._turns, text, prompt
            )
        conditions.check_prompt(prompt)
        loop = GenerationLoop(self.prefiller, sampling, conditions, self.tokenizer, self.drafter)
        self._unread_stream = stream = StepStream(
            self._generate_reply(loop, prompt, text, progress, branch_points)
        )
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
        self.stop_conditions.check_prompt(prompt)
        turn = Turn(text, "", num_tokens, tuple(prompt[num_tokens:]), len(prompt))
        try:
            self.prefiller.prefill(prompt, progress, ())
            self._turns, self._tokens = [*self._turns, turn], prompt
        finally:
            self._sync_cache()

    def rewind(self, to: int) -> None:
        """Rewind to length `to`: a reply may be cut, a message is removed as a whole."""
        self._finish_stream()
        turns = self._truncate_turns(to)
        tokens = join_turns(turns)
        self.prefiller.align_cache(tokens)
        self._turns, self._tokens = turns, tokens

    def reset(self) -> None:
        """Start a new conversation; discard an unread reply without computing it."""
        self._unread_stream = None
        self._finish_stream()
        self.prefiller.reset()
        self._turns, self._tokens = [], []

    def fork(self) -> Session:
        """Return an independent copy of the conversation."""
        self._finish_stream()
        copy = Session.__new__(Session)
        copy.__dict__.update(self.__dict__)
        copy.prefiller, copy.drafter = self.prefiller.fork(), self.drafter.fork()
        copy._tokens, copy._turns = list(self._tokens), list(self._turns)
        return copy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation and its cache to a file, which `load` continues."""
        self._finish_stream()
        model = self.prefiller.decoder.fingerprint
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
        turns, tokens = (
            format_count(len(self._turns), "turn"),
            format_count(len(self._tokens), "token"),
        )
        contents = f"{turns}, {tokens}, {format_size(self.cache.nbytes)}"
        return f"Session({describe_spec(self.cache.spec)}: {contents})"

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the cache and the share of prompt tokens it already held."""
        self._finish_stream()
        prefiller = self.prefiller
        num_prompt_tokens = prefiller.num_prompt_tokens
        return self.cache.stats() | {
            "tokens": len(self._tokens),
            "tokens_asked": num_prompt_tokens,
            "tokens_reused": prefiller.num_cached_tokens,
            "tokens_restored": prefiller.num_restored_tokens,
            "hit_rate": prefiller.num_cached_tokens / max(num_prompt_tokens, 1),
            "drafts": self._num_drafts,
            "drafts_accepted": self._num_accepted_drafts,
            "prefix_lost": prefiller.prefixes.describe_mismatch(self.tokenizer),
        }

    def _load_conversation(
        self, path: str | os.PathLike[str], saved_cache: files.SavedCache
    ) -> None:
        prefiller, transcript = self.prefiller, Transcript.from_header(path, saved_cache.about)
        transcript.check_model(path, prefiller.decoder.fingerprint)
        with convert_errors(path):
            cache = prefiller.decoder.make_cache(saved_cache.spec)
            cache.backend = prefiller.cache.backend
            cache.restore(saved_cache.snapshot)
            tokens = transcript.get_tokens(cache.length, prefiller.decoder.vocab_size)
            namespace = self._make_prefix_namespace(prefiller.decoder, cache)
        self.prefiller = Prefiller(
            prefiller.decoder, cache, prefiller.strategy, prefiller.chunk_size, namespace
        )
        self.prefiller.set_tokens(tokens[: cache.length])
        self.prompt_format = make_prompt_format(
            self.tokenizer, transcript.system, transcript.template
        )
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

    def _generate_reply(
        self,
        loop: GenerationLoop,
        prompt: list[int],
        message: str,
        progress: PrefillProgress | None,
        branch_points: Sequence[int],
    ) -> Generator[Step, None, None]:
        self._unread_stream = None
        steps, reply = loop.generate_steps(prompt, progress, branch_points), ""
        try:
            for step in steps:
                reply += step.text
                yield step
        finally:
            steps.close()
            self._add_turn(loop, prompt, message, reply)

    def _add_turn(self, loop: GenerationLoop, prompt: list[int], message: str, text: str) -> None:
        """Append the turn as far as its reply was generated; without a reply there is no turn."""
        self._num_drafts += loop.num_drafts
        self._num_accepted_drafts += loop.num_accepted_drafts
        if loop.num_generated:
            shared = count_shared_prefix(self._tokens, prompt)
            tokens = tuple(loop.tokens[shared:])
            self._turns.append(Turn(message, text + loop.flush(), shared, tokens, len(prompt)))
            self._tokens = loop.tokens
        self._sync_cache()

    def _sync_cache(self) -> None:
        """Rewind the cache to the prefix that it shares with the conversation."""
        self.prefiller.insert_prefix()  # the prompt, or as much of it as was prefilled
        self.prefiller.align_cache(self._tokens)  # rolls back a failed forward
        self.cache.checkpoint()

    def _finish_stream(self) -> None:
        """Compute a reply that was never iterated; end one that was."""
        if self._unread_stream is not None:
            self._unread_stream.finish()
        stream = None if self._stream_ref is None else self._stream_ref()
        if stream is not None:
            stream.close()

    def _make_prefix_namespace(
        self, decoder: Decoder, cache: SequenceCache
    ) -> PrefixNamespace | None:
        """Open the prefixes of this model and this spec."""
        if self._prefixes is None:
            return None
        if not isinstance(decoder, TransformersDecoder) or not isinstance(cache, TransformersCache):
            raise TypeError("prefixes need a transformers model: its weights identify them")
        return self._prefixes.open_namespace(decoder.model, cache)


@explain.register
def _(session: Session) -> Any:
    """Explain which backend reads a session's cache."""
    return explain(session.cache)
