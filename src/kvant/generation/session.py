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
from kvant.generation.conversation import Transcript, Turn, dialogue_of, refusing, tokens_of
from kvant.generation.decoder import Decoder, HostDecoder, Memory, decoder_of
from kvant.generation.drafts import Drafter, drafter_of
from kvant.generation.grammar import Grammar, rules_of
from kvant.generation.loop import Run, Step, Steps
from kvant.generation.reader import Progress, Reader, shared_prefix
from kvant.generation.settings import Limits, Sampling
from kvant.generation.strategy import strategy_of
from kvant.hf import HostCache
from kvant.prefixes import Prefixes, Shelf
from kvant.recipes import AnySpec
from kvant.sizes import counted, format_size
from kvant.spec import words


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
        kv_cache: AnySpec | Memory = "raw",
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
        decoder = decoder_of(model)
        memory = decoder.memory(kv_cache, tokenizer)
        if backend is not None:
            memory.backend = backend
        if memory.length:
            raise ValueError(
                f"a cache of {memory.length} tokens: begin with an empty one; kvant.Session keeps "
                "one cache over many turns"
            )
        chosen = strategy_of(strategy, threshold, budget)
        if budget is not None and memory.spec.prunes:
            raise ValueError("a budget beside a prune: what goes, goes by one of them")
        self._prefixes = prefixes
        if prefixes is not None:
            if isinstance(kv_cache, HostCache):
                raise TypeError("a cache beside prefixes: they bring their own; give a spec")
            if budget is not None:
                raise ValueError("a budget beside prefixes: what is kept is of one spec")
            if draft is not None:
                memory.widen(max_drafts + 1)  # as it will be
        shelf = self._shelf(decoder, memory)
        self.reader = Reader(decoder, memory, chosen, prefill_chunk, shelf)
        self.tokenizer = tokenizer
        self.dialogue = dialogue_of(tokenizer, system, template)
        self.drafter = drafter_of(draft)
        self.limits = Limits(
            max_context=decoder.context if max_context is None else max_context,
            vocabulary=decoder.vocabulary,
            max_drafts=max_drafts,
        )
        self._tokens: list[int] = []  # those of the last turn
        self._turns: list[Turn] = []
        self._drafts = self._drafts_accepted = 0
        self._unread: Steps | None = None  # a reply of which nothing was taken yet
        self._begun: weakref.ref[Steps] | None = None  # who drops it has ended the reply

    @property
    def memory(self) -> Memory:
        return self.reader.memory

    @property
    def tokens(self) -> list[int]:
        """All that was said; the memory holds a beginning of it."""
        self._settle()
        return list(self._tokens)

    @property
    def turns(self) -> list[Turn]:
        self._settle()
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
        progress: Progress | None = None,
        marks: Sequence[int] = (),
    ) -> Steps:
        """Stream the reply to a message, or to tokens that stand behind all others as they are.

        `marks` are lengths at which other prompts may begin to differ, for prefixes: of messages
        they are known. What is wrong with the arguments is said here, before the first step, and
        changes nothing.
        The reply is computed as its steps are taken; one that nobody took a step of is computed to
        its end by the next call of any other method, and its steps can still be taken then.
        """
        self._settle()
        limits = replace(
            self.limits,
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            end_tokens=frozenset() if ignore_end else self.reader.decoder.end_tokens,
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
            rules=rules_of(grammar, self.tokenizer, limits.end_tokens),
        )
        prompt, text = self._prompt(message)
        if self._prefixes is not None and isinstance(message, str):
            marks = marks or self.dialogue.marks(self._turns, text, prompt)
        limits.check_prompt(prompt)
        run = Run(self.reader, sampling, limits, self.tokenizer, self.drafter)
        self._unread = stream = Steps(self._reply(run, prompt, text, progress, marks))
        self._begun = weakref.ref(stream)
        return stream

    def read(self, message: str | Sequence[int], *, progress: Progress | None = None) -> None:
        """Read a text, or tokens, that a later message continues; there is no reply yet."""
        self._settle()
        if self.dialogue.template:
            raise ValueError("a text without a reply, where a template lays out turns: use send")
        prompt, text = self._prompt(message)
        held = len(self._tokens)
        if len(prompt) == held:
            raise PromptError("the text has no tokens: there is nothing to read")
        self.limits.check_prompt(prompt)
        turn = Turn(text, "", held, tuple(prompt[held:]), len(prompt))
        try:
            self.reader.prompt(prompt, progress, ())
            self._turns, self._tokens = [*self._turns, turn], prompt
        finally:
            self._after()

    def rewind(self, to: int) -> None:
        """Go back to length `to`: a reply may be cut short, a message is taken back whole."""
        self._settle()
        kept = self._until(to)
        tokens = tokens_of(kept)
        self.reader.align(tokens)
        self._turns, self._tokens = kept, tokens

    def reset(self) -> None:
        """Begin a new conversation; of the old one not even an unread reply is computed."""
        self._unread = None
        self._settle()
        self.reader.reset()
        self._turns, self._tokens = [], []

    def fork(self) -> Session:
        """A second conversation with the same past, independent of this one from now on."""
        self._settle()
        twin = Session.__new__(Session)
        twin.__dict__.update(self.__dict__)
        twin.reader, twin.drafter = self.reader.fork(), self.drafter.fork()
        twin._tokens, twin._turns = list(self._tokens), list(self._turns)
        return twin

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation and its memory to a file, for `load` to continue."""
        self._settle()
        model = self.reader.decoder.identity
        said = Transcript(tuple(self._turns), self.dialogue.system, self.dialogue.template, model)
        files.save(self.memory, path, about=said.about())

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
        said = Transcript.of(path, saved.about)
        said.check_model(path, decoder_of(model).identity)
        with refusing(path):
            session = cls(model, tokenizer, saved.spec, template=said.template, backend=backend)
        session._become(path, saved)
        return session

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Go on with the conversation in a file in place of this one, stored as it is there."""
        self._settle()
        self._become(path, files.read(path))

    def __repr__(self) -> str:
        turns, tokens = counted(len(self._turns), "turn"), counted(len(self._tokens), "token")
        held = f"{turns}, {tokens}, {format_size(self.memory.nbytes)}"
        return f"Session({words(self.memory.spec)}: {held})"

    def stats(self) -> dict[str, Any]:
        """What the memory holds, and how much of what was asked it held already."""
        self._settle()
        asked, reused = self.reader.asked, self.reader.reused
        return self.memory.stats() | {
            "tokens": len(self._tokens),
            "tokens_asked": asked,
            "tokens_reused": reused,
            "tokens_restored": self.reader.restored,
            "hit_rate": reused / asked if asked else 0.0,
            "drafts": self._drafts,
            "drafts_accepted": self._drafts_accepted,
            "prefix_lost": self.reader.prefixes.told(self.tokenizer),
        }

    def _become(self, path: str | os.PathLike[str], saved: files.Saved) -> None:
        old, said = self.reader, Transcript.of(path, saved.about)
        said.check_model(path, old.decoder.identity)
        with refusing(path):
            memory = old.decoder.memory(saved.spec)
            memory.backend = old.memory.backend
            memory.restore(saved.snapshot)
            tokens = said.tokens(memory.length, old.decoder.vocabulary)
            shelf = self._shelf(old.decoder, memory)
        self.reader = Reader(old.decoder, memory, old.strategy, old.chunk, shelf)
        self.reader.adopt(tokens[: memory.length])
        self.dialogue = dialogue_of(self.tokenizer, said.system, said.template)
        self._tokens, self._turns = tokens, list(said.turns)

    def _until(self, to: int) -> list[Turn]:
        """The turns up to a length that the conversation had, the newest such."""
        if to == 0:
            return []
        for index in reversed(range(len(self._turns))):
            turn, before = self._turns[index], self._turns[:index]
            if to == turn.end or turn.begin < to < turn.end:
                cut = replace(turn, tokens=turn.tokens[: to - turn.shared])
                said = tokens_of([*before, cut])[turn.begin :]
                text = turn.reply
                if to < turn.end:
                    text = self.tokenizer.decode(said, skip_special_tokens=True)
                return [*before, replace(cut, reply=text)]
        ends = [0, *(turn.end for turn in self._turns)]
        raise RewindError(
            f"length {to}: replies can be cut short, but a message is taken back whole; the turns "
            f"end at {ends}"
        )

    def _prompt(self, message: str | Sequence[int]) -> tuple[list[int], str]:
        """All tokens before the reply to a message, and its text; tokens are told none."""
        if isinstance(message, str):
            return self.dialogue.prompt(self._turns, self._tokens, message), message
        if self.dialogue.template:
            raise ValueError("tokens as a message: a chat template takes text (or template=False)")
        return [*self._tokens, *(int(token) for token in message)], ""

    def _reply(
        self,
        run: Run,
        prompt: list[int],
        message: str,
        progress: Progress | None,
        marks: Sequence[int],
    ) -> Generator[Step, None, None]:
        self._unread = None
        steps, said = run.steps(prompt, progress, marks), ""
        try:
            for step in steps:
                said += step.text
                yield step
        finally:
            steps.close()
            self._keep(run, prompt, message, said)

    def _keep(self, run: Run, prompt: list[int], message: str, said: str) -> None:
        """Remember a turn as far as it came; without a reply there was none."""
        self._drafts += run.drafts
        self._drafts_accepted += run.drafts_accepted
        if run.said:
            shared = shared_prefix(self._tokens, prompt)
            tokens = tuple(run.tokens[shared:])
            self._turns.append(Turn(message, said + run.rest(), shared, tokens, len(prompt)))
            self._tokens = run.tokens
        self._after()

    def _after(self) -> None:
        """Hold what the conversation shares with what was read."""
        self.reader.keep()  # of a prompt that was not read whole, what there is of it
        self.reader.align(self._tokens)  # undoes a forward that died
        self.memory.checkpoint()

    def _settle(self) -> None:
        """A reply that nobody began is computed now; one that was begun ends where it is."""
        if self._unread is not None:
            self._unread.finish()
        begun = None if self._begun is None else self._begun()
        if begun is not None:
            begun.close()

    def _shelf(self, decoder: Decoder, memory: Memory) -> Shelf | None:
        """Prefixes of this model, stored as this memory stores them."""
        if self._prefixes is None:
            return None
        if not isinstance(decoder, HostDecoder) or not isinstance(memory, HostCache):
            raise TypeError("prefixes are of models of transformers: others have no weights")
        return self._prefixes.shelf(decoder.model, memory)


@explain.register
def _(session: Session) -> Any:
    """Explain the cache of a session."""
    return explain(session.memory)
