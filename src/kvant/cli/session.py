"""A session as the command line asks for it, and its replies as they come.

A session is a new one, or one from a file. Text of a reply goes to standard output, progress and
figures to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant import checkpoints, heap
from kvant.cli.options import check_asked, check_backend, check_readable, check_saved, spec_of
from kvant.devices import check_device, check_dtype, warn_of_slow_weights
from kvant.progress import Bar
from kvant.sizes import counted, format_size, parse_size
from kvant.spec import words
from kvant.spec.auto import check_spec, is_auto
from kvant.tables import blank

PATIENCE = 0.1  # seconds after which a bar tells how much is still to be written


@dataclass(frozen=True)
class Wanted:
    """What the options of a command say of a session."""

    model: str | None
    kv_cache: str | None
    window_size: int | None
    window_keep: int | None
    max_context: int | None
    strategy: str
    threshold: int
    budget: str | None
    draft: str | None
    load: Path | None
    guard: bool
    trust_remote_code: bool
    device: str | None
    dtype: str
    prefill_chunk: int
    backend: str | None = None
    pack: bool = True
    store: list[str] | None = None
    chat: bool = False  # the model must have a chat template

    @property
    def spec(self) -> str:
        return spec_of(self.kv_cache, self.window_size, self.window_keep)

    @property
    def bytes(self) -> int | None:
        return None if self.budget is None else parse_size(self.budget)

    def check(self, asked: Mapping[str, Any]) -> None:
        """Before anything is loaded: what is said twice or wrong, and files that are not there."""
        from kvant.generation.settings import check_strategy

        if self.load is not None:
            check_readable(self.load, "--load")  # before what imports torch
        check_asked(asked, self.max_context)
        check_strategy(self.strategy, self.threshold, self.bytes)
        if self.store and self.budget is not None:
            raise ValueError("--budget beside --store: what is kept there is of one format")
        check_spec(self.spec)
        check_backend(self.backend)
        check_device(self.device)
        check_dtype(self.dtype)
        checkpoints.check(self.model)
        if self.draft not in (None, "ngram"):
            checkpoints.check(self.draft, flag="--draft", tokenizer=False)
        if self.load is not None:
            self._check_file(self.load)

    def _check_file(self, file: Path) -> None:
        told = {"--kv-cache": self.kv_cache, "--kv-window-size": self.window_size}
        told["--kv-window-keep"] = self.window_keep
        for flag, value in told.items():
            if value is not None:
                raise ValueError(f"{flag} {value} beside --load: the file says how it is kept")
        check_saved(file, self.model)

    def session(
        self,
        asked: Mapping[str, Any],
        *,
        template: bool,
        system: str | None = None,
        prefixes: Any = None,
    ) -> Any:
        """Load the model, and begin or go on; `asked` is what `send` will be told."""
        self.check(asked)
        model, tokenizer = checkpoints.load(self.model, **self._placed)
        if self.chat and tokenizer.chat_template is None:
            raise ValueError(
                "--chat: this model has no chat template: leave --chat out, and the prompt is "
                "continued as it is"
            )
        self._packed(model)
        heap.keep()
        from kvant.generation import Session

        named = "raw" if self.load is not None else self.spec
        spec = attached(model, named, tokenizer, self.guard)
        session = Session(
            model,
            tokenizer,
            spec,
            system=system,
            template=template,
            max_context=self.max_context,
            prefill_chunk=self.prefill_chunk,
            strategy=self.strategy,
            threshold=self.threshold,
            budget=self.bytes,
            draft=self._drafter(),
            backend=self.backend,
            prefixes=prefixes,
        )
        if self.load is not None:
            session.resume(self.load)
        return session

    def _drafter(self) -> Any:
        if self.draft in (None, "ngram"):
            return self.draft
        return self._packed(checkpoints.load_model(self.draft, flag="--draft", **self._placed))

    def _packed(self, model: Any) -> Any:
        """The model itself, which is ours to change."""
        if self.pack:
            from kvant.weights import pack

            pack(model)
        return model

    @property
    def _placed(self) -> dict[str, Any]:
        """How models are loaded, a draft like the one that it drafts for."""
        return {
            "trust_code": self.trust_remote_code,
            "device": self.device,
            "dtype": self.dtype,
        }


@contextmanager
def prefixes_in(store: list[str] | None, *, quiet: bool, most: str | None = None) -> Iterator[Any]:
    """Prefixes that are kept in a store, where one is named: all is written there in the end.

    Whoever is interrupted waits for nothing.
    """
    if not store:
        yield None
        return
    from kvant.prefixes import Prefixes

    prefixes = Prefixes(most, store=store)
    try:
        yield prefixes
        with Bar("bytes for the store", quiet=quiet) as bar:
            total = prefixes.nbytes_unwritten
            while not prefixes.flush(PATIENCE):
                bar.show(total - prefixes.nbytes_unwritten, total)
    except BaseException:
        prefixes.abandon()
        raise
    told = prefixes.stats()["store"]
    prefixes.close()
    for one in told["stores"]:
        if one["unwritten"]:
            show(f"warning: {one['url']} did not take {one['unwritten']} pages")
    if told["dropped"]:
        show(f"warning: {told['dropped']} prefixes were not written: too many waited")


def attached(model: Any, asked: str, tokenizer: Any, guard: bool) -> Any:
    """The spec that the model is attached with; what it does to the model is said.

    So is what the dtype of its weights costs.
    """
    from kvant import probing

    warn_of_slow_weights(model, lambda line: show(f"warning: {line}"))
    with Bar(f"trying {asked}") as tried:

        def progress(done: int, total: int) -> None:
            if done == 0:  # a trial begins: its verdict was not known
                show(_trial_line(asked, is_auto(asked)))
            tried.show(done, total)

        found = probing.attached(model, asked, tokenizer, guard=guard, progress=progress)
    if found.spec != asked:
        show(f"{asked}: {found.spec}")
        _show_candidates(model, found)
    if found.warning is not None:
        show(f"warning: {found.warning}")
    return found.spec


def _trial_line(spec: str, auto: bool) -> str:
    """Name the spec that is about to be tried, and what the trial costs."""
    from kvant.probing.guard import BUDGET

    if auto:
        return f"{spec}: trying formats on the model, the smallest first"
    return f"trying {spec} on the model (at most {BUDGET:g} s; --no-guard skips it)"


def _show_candidates(model: Any, found: Any) -> None:
    """What `auto` tried, on standard error."""
    from kvant.planner import plan

    console, table = blank(stderr=True)
    for head in ("", "tried", "bytes a token", "KL", "top-1", "recall lost", "verdict"):
        table.add_column(head, no_wrap=True)
    for one in found.candidates:
        mark = "*" if one.spec == found.spec else ""
        nbytes = plan(model, one.spec, context=1).nbytes_per_token
        lost = "" if one.lost is None else f"{one.lost:.2g}"
        cells = (f"{nbytes:.0f}", f"{one.mean_kl:.2g}", f"{one.top1:.1%}", lost, one.verdict)
        table.add_row(mark, one.spec, *cells)
    console.print(table)


@dataclass(frozen=True)
class Named:
    """What a cache is called: as it was asked for, for as long as it is stored so."""

    asked: str
    begun: str

    @classmethod
    def of(cls, wanted: Wanted, session: Any) -> Named:
        """Of a session that begins, or goes on from a file."""
        begun = present(session)
        found = wanted.load is not None or is_auto(wanted.spec)
        return cls(begun if found else wanted.spec, begun)

    def now(self, session: Any) -> str:
        stored = present(session)
        return self.asked if stored == self.begun else stored


def present(session: Any) -> str:
    return words(session.memory.spec) or "raw"  # where no layer has rows


@dataclass
class Reply:
    """What was generated, and when."""

    text: str = ""
    tokens: int = 0
    first: float = 0.0  # seconds to the first token
    rest: float = 0.0  # seconds for the others
    finish_reason: str | None = None

    def take(self, steps: Iterator[Any], reading: Bar, before: str, quiet: bool) -> None:
        """Print text as it comes, behind `before`."""
        begin = time.perf_counter()
        for step in steps:
            now = time.perf_counter() - begin
            if self.tokens == 0:
                self.first = now
                reading.stop()
                if not quiet:
                    print(before, end="")
            self.text += step.text
            self.tokens += 1
            self.rest = now - self.first
            self.finish_reason = step.finish_reason
            if not quiet:
                print(step.text, end="", flush=True)
        if not quiet:
            print()

    def figures(self) -> dict[str, Any]:
        speed = (self.tokens - 1) / self.rest if self.rest > 0 and self.tokens > 1 else None
        return {
            "tokens": self.tokens,
            "seconds_to_first": self.first,
            "tokens_a_second": speed,
            "finish_reason": self.finish_reason,
        }

    def line(self, spec: str, session: Any) -> str:
        """For people: how fast, and on how much."""
        cache = session.stats()
        speed = self.figures()["tokens_a_second"]
        told = "" if speed is None else f", {speed:.1f} a second"
        if restored := cache["tokens_restored"]:
            told += f", {restored} of all prompts from the store"
        return (
            f"{counted(self.tokens, 'token')}{told}, the first after {self.first:.2f} s; "
            f"{spec}: {counted(cache['length'], 'token')} held in {held(session)}"
        )


def held(session: Any) -> str:
    """Its memory beside that of a raw cache: 1.2 MiB, 0.31 of raw."""
    from kvant.planner import plan

    cache = session.stats()
    length, nbytes = cache["length"], cache["nbytes"]
    raw = plan(session.reader.decoder.model, "raw", context=length).nbytes if length else 0
    if not raw:
        return format_size(nbytes)
    saved = f", {format_size(raw - nbytes)} saved" if nbytes < raw else ""
    return f"{format_size(nbytes)}, {nbytes / raw:.2f} of raw{saved}"


def story(recoded: Sequence[dict[str, Any]]) -> list[str]:
    """For people: how what is stored became smaller, a line a step."""
    return [
        f"at {step['length']} tokens: {step['from']} to {step['to']}, "
        f"{format_size(step['nbytes_before'])} to {format_size(step['nbytes_after'])}"
        for step in recoded
    ]


def show(line: str) -> None:
    """Something beside the text."""
    print(line, file=sys.stderr)
