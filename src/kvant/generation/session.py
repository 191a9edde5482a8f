"""A conversation: what was said, and a memory that is never asked to read it twice.

The tokens of the conversation are one list; the memory holds a beginning of it. A reply belongs to
the conversation as far as it was taken from the stream: who stops early has said that much. A
reply of which nothing was taken is computed to its end before anything else is done with the
session, so no message is lost.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

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
from kvant.generation.decoder import Decoder, SequenceCache, TransformersDecoder, make_decoder
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
        model: Any,
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
        draft: Any | Drafter | None = None,
        max_drafts: int = 8,
        backend: str | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """`template=False` lets messages continue one text, whatever template there is.

        The other options are those of `kvant.generate`. With `prefixes` the memory may be another
        one after each message: one that holds more of it.
        """
        if tokenizer is None:
            raise TypeError("tokenizer=None: the model's own is needed, to read text and write it")
        decoder = make_decoder(model)
        memory = decoder.make_cache(kv_cache, tokenizer)
        if backend is not None:
            memory.backend = backend
        if memory.length:
            raise ValueError(
                f"a cache of {memory.length} tokens: begin with an empty one; kvant.Session keeps "
                "one cache over many turns"
            )
        chosen = make_strategy(strategy, threshold, budget)
        if budget is not None and memory.spec.prunes:
            raise ValueError("a budget beside a prune: what goes, goes by one of them")
        self._prefixes = prefixes
        if prefixes is not None:
            if isinstance(kv_cache, TransformersCache):
                raise TypeError("a cache beside prefixes: they bring their own; give a spec")
            if budget is not None:
                raise ValueError("a budget beside prefixes: what is kept is of one spec")
            if draft is not None:
                memory.ensure_slack(max_drafts + 1)  # as it will be
        shelf = self._make_prefix_namespace(decoder, memory)
        self.prefiller = Prefiller(decoder, memory, chosen, prefill_chunk, shelf)
        self.tokenizer = tokenizer
        self.prompt_format = make_prompt_format(tokenizer, system, template)
        self.drafter = make_drafter(draft)
        self.stop_conditions = StopConditions(
            max_context=decoder.max_context if max_context is None else max_context,
            vocab_size=decoder.vocab_size,
            max_drafts=max_drafts,
        )
        self._tokens: list[int] = []  # those of the last turn
        self._turns: list[Turn] = []
        self._num_drafts = self._num_accepted_drafts = 0
        self._unread_stream: StepStream | None = None  # a reply of which nothing was taken yet
        self._stream_ref: weakref.ref[StepStream] | None = None  # who drops it has ended the reply

    @property
    def cache(self) -> SequenceCache:
        return self.prefiller.cache

    @property
    def tokens(self) -> list[int]:
        """All that was said; the memory holds a beginning of it."""
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
        """Stream the reply to a message, or to tokens that stand behind all others as they are.

        `marks` are lengths at which other prompts may begin to differ, for prefixes: of messages
        they are known. What is wrong with the arguments is said here, before the first step, and
        changes nothing.
        The reply is computed as its steps are taken; one that nobody took a step of is computed to
        its end by the next call of any other method, and its steps can still be taken then.
        """
        self._finish_stream()
        limits = replace(
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
            grammar=compile_grammar(grammar, self.tokenizer, limits.end_tokens),
        )
        prompt, text = self._make_prompt(message)
        if self._prefixes is not None and isinstance(message, str):
            branch_points = branch_points or self.prompt_format.find_branch_points(
                self._turns, text, prompt
            )
        limits.check_prompt(prompt)
        run = GenerationLoop(self.prefiller, sampling, limits, self.tokenizer, self.drafter)
        self._unread_stream = stream = StepStream(
            self._generate_reply(run, prompt, text, progress, branch_points)
        )
        self._stream_ref = weakref.ref(stream)
        return stream

    def read(
        self, message: str | Sequence[int], *, progress: PrefillProgress | None = None
    ) -> None:
        """Read a text, or tokens, that a later message continues; there is no reply yet."""
        self._finish_stream()
        if self.prompt_format.uses_template:
            raise ValueError("a text without a reply, where a template lays out turns: use send")
        prompt, text = self._make_prompt(message)
        held = len(self._tokens)
        if len(prompt) == held:
            raise PromptError("the text has no tokens: there is nothing to read")
        self.stop_conditions.check_prompt(prompt)
        turn = Turn(text, "", held, tuple(prompt[held:]), len(prompt))
        try:
            self.prefiller.prefill(prompt, progress, ())
            self._turns, self._tokens = [*self._turns, turn], prompt
        finally:
            self._sync_cache()

    def rewind(self, to: int) -> None:
        """Go back to length `to`: a reply may be cut short, a message is taken back whole."""
        self._finish_stream()
        kept = self._truncate_turns(to)
        tokens = join_turns(kept)
        self.prefiller.align_cache(tokens)
        self._turns, self._tokens = kept, tokens

    def reset(self) -> None:
        """Begin a new conversation; of the old one not even an unread reply is computed."""
        self._unread_stream = None
        self._finish_stream()
        self.prefiller.reset()
        self._turns, self._tokens = [], []

    def fork(self) -> Session:
        """A second conversation with the same past, independent of this one from now on."""
        self._finish_stream()
        twin = Session.__new__(Session)
        twin.__dict__.update(self.__dict__)
        twin.prefiller, twin.drafter = self.prefiller.fork(), self.drafter.fork()
        twin._tokens, twin._turns = list(self._tokens), list(self._turns)
        return twin

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation and its memory to a file, for `load` to continue."""
        self._finish_stream()
        model = self.prefiller.decoder.fingerprint
        said = Transcript(
            tuple(self._turns), self.prompt_format.system, self.prompt_format.uses_template, model
        )
        files.save(self.cache, path, about=said.to_header())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Any,
        tokenizer: Any,
        *,
        backend: str | None = None,
    ) -> Session:
        """The conversation in a file, with the model that held it."""
        saved = files.read(path)
        said = Transcript.from_header(path, saved.about)
        said.check_model(path, make_decoder(model).fingerprint)
        with convert_errors(path):
            session = cls(model, tokenizer, saved.spec, template=said.template, backend=backend)
        session._load_conversation(path, saved)
        return session

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Go on with the conversation in a file in place of this one, stored as it is there."""
        self._finish_stream()
        self._load_conversation(path, files.read(path))

    def __repr__(self) -> str:
        turns, tokens = (
            format_count(len(self._turns), "turn"),
            format_count(len(self._tokens), "token"),
        )
        held = f"{turns}, {tokens}, {format_size(self.cache.nbytes)}"
        return f"Session({describe_spec(self.cache.spec)}: {held})"

    def stats(self) -> dict[str, Any]:
        """What the memory holds, and how much of what was asked it held already."""
        self._finish_stream()
        asked, reused = self.prefiller.num_prompt_tokens, self.prefiller.num_cached_tokens
        return self.cache.stats() | {
            "tokens": len(self._tokens),
            "tokens_asked": asked,
            "tokens_reused": reused,
            "tokens_restored": self.prefiller.num_restored_tokens,
            "hit_rate": reused / asked if asked else 0.0,
            "drafts": self._num_drafts,
            "drafts_accepted": self._num_accepted_drafts,
            "prefix_lost": self.prefiller.prefixes.describe_mismatch(self.tokenizer),
        }

    def _load_conversation(
        self, path: str | os.PathLike[str], saved_cache: files.SavedCache
    ) -> None:
        old, said = self.prefiller, Transcript.from_header(path, saved_cache.about)
        said.check_model(path, old.decoder.fingerprint)
        with convert_errors(path):
            memory = old.decoder.make_cache(saved_cache.spec)
            memory.backend = old.cache.backend
            memory.restore(saved_cache.snapshot)
            tokens = said.get_tokens(memory.length, old.decoder.vocab_size)
            shelf = self._make_prefix_namespace(old.decoder, memory)
        self.prefiller = Prefiller(old.decoder, memory, old.strategy, old.chunk_size, shelf)
        self.prefiller.set_tokens(tokens[: memory.length])
        self.prompt_format = make_prompt_format(self.tokenizer, said.system, said.template)
        self._tokens, self._turns = tokens, list(said.turns)

    def _truncate_turns(self, to: int) -> list[Turn]:
        """The turns up to a length that the conversation had, the newest such."""
        if to == 0:
            return []
        for index in reversed(range(len(self._turns))):
            turn, before = self._turns[index], self._turns[:index]
            if to == turn.end or turn.begin < to < turn.end:
                cut = replace(turn, tokens=turn.tokens[: to - turn.shared])
                said = join_turns([*before, cut])[turn.begin :]
                text = turn.reply
                if to < turn.end:
                    text = self.tokenizer.decode(said, skip_special_tokens=True)
                return [*before, replace(cut, reply=text)]
        ends = [0, *(turn.end for turn in self._turns)]
        raise RewindError(
            f"length {to}: replies can be cut short, but a message is taken back whole; the turns "
            f"end at {ends}"
        )

    def _make_prompt(self, message: str | Sequence[int]) -> tuple[list[int], str]:
        """All tokens before the reply to a message, and its text; tokens are told none."""
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
        steps, said = loop.generate_steps(prompt, progress, branch_points), ""
        try:
            for step in steps:
                said += step.text
                yield step
        finally:
            steps.close()
            self._add_turn(loop, prompt, message, said)

    def _add_turn(self, loop: GenerationLoop, prompt: list[int], message: str, text: str) -> None:
        """Remember a turn as far as it came; without a reply there was none."""
        self._num_drafts += loop.num_drafts
        self._num_accepted_drafts += loop.num_accepted_drafts
        if loop.num_generated:
            shared = count_shared_prefix(self._tokens, prompt)
            tokens = tuple(loop.tokens[shared:])
            self._turns.append(Turn(message, text + loop.flush(), shared, tokens, len(prompt)))
            self._tokens = loop.tokens
        self._sync_cache()

    def _sync_cache(self) -> None:
        """Hold what the conversation shares with what was read."""
        self.prefiller.insert_prefix()  # of a prompt that was not read whole, what there is of it
        self.prefiller.align_cache(self._tokens)  # undoes a forward that died
        self.cache.checkpoint()

    def _finish_stream(self) -> None:
        """A reply that nobody began is computed now; one that was begun ends where it is."""
        if self._unread_stream is not None:
            self._unread_stream.finish()
        begun = None if self._stream_ref is None else self._stream_ref()
        if begun is not None:
            begun.close()

    def _make_prefix_namespace(
        self, decoder: Decoder, cache: SequenceCache
    ) -> PrefixNamespace | None:
        """Prefixes of this model, stored as this memory stores them."""
        if self._prefixes is None:
            return None
        if not isinstance(decoder, TransformersDecoder) or not isinstance(cache, TransformersCache):
            raise TypeError("prefixes are of models of transformers: others have no weights")
        return self._prefixes.open_namespace(decoder.model, cache)


@explain.register
def _(session: Session) -> Any:
    """Explain the cache of a session."""
    return explain(session.cache)
