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

from kvant import checkpoints, malloc
from kvant.cli.options import (
    check_backend,
    check_readable,
    check_send_options,
    check_transcript,
    merge_spec,
)
from kvant.devices import check_device, check_dtype, warn_of_slow_weights
from kvant.progress import ProgressBar
from kvant.sizes import format_count, format_size, parse_size
from kvant.spec import describe_spec
from kvant.spec.auto import check_spec_or_auto, is_auto
from kvant.tables import make_table

FLUSH_POLL_S = 0.1  # seconds after which a bar tells how much is still to be written


@dataclass(frozen=True)
class SessionOptions:
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
        return merge_spec(self.kv_cache, self.window_size, self.window_keep)

    @property
    def budget_bytes(self) -> int | None:
        return None if self.budget is None else parse_size(self.budget)

    def check(self, send_options: Mapping[str, Any]) -> None:
        """Before anything is loaded: what is said twice or wrong, and files that are not there."""
        from kvant.generation.settings import check_strategy

        if self.load is not None:
            check_readable(self.load, "--load")  # before what imports torch
        check_send_options(send_options, self.max_context)
        check_strategy(self.strategy, self.threshold, self.budget_bytes)
        if self.store and self.budget is not None:
            raise ValueError("--budget beside --store: what is kept there is of one format")
        check_spec_or_auto(self.spec)
        check_backend(self.backend)
        check_device(self.device)
        check_dtype(self.dtype)
        checkpoints.check_checkpoint(self.model)
        if self.draft not in (None, "ngram"):
            checkpoints.check_checkpoint(self.draft, flag="--draft", tokenizer=False)
        if self.load is not None:
            self._check_file(self.load)

    def _check_file(self, file: Path) -> None:
        told = {"--kv-cache": self.kv_cache, "--kv-window-size": self.window_size}
        told["--kv-window-keep"] = self.window_keep
        for flag, value in told.items():
            if value is not None:
                raise ValueError(f"{flag} {value} beside --load: the file says how it is kept")
        check_transcript(file, self.model)

    def open_session(
        self,
        send_options: Mapping[str, Any],
        *,
        template: bool,
        system: str | None = None,
        prefixes: Any = None,
    ) -> Any:
        """Load the model, and begin or go on; `asked` is what `send` will be told."""
        self.check(send_options)
        model, tokenizer = checkpoints.load(self.model, **self._load_options)
        if self.chat and tokenizer.chat_template is None:
            raise ValueError(
                "--chat: this model has no chat template: leave --chat out, and the prompt is "
                "continued as it is"
            )
        self._pack_model(model)
        malloc.keep_freed_memory()
        from kvant.generation import Session

        named = "raw" if self.load is not None else self.spec
        spec = attach_model(model, named, tokenizer, self.guard)
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
            budget=self.budget_bytes,
            draft=self._load_draft(),
            backend=self.backend,
            prefixes=prefixes,
        )
        if self.load is not None:
            session.resume(self.load)
        return session

    def _load_draft(self) -> Any:
        if self.draft in (None, "ngram"):
            return self.draft
        return self._pack_model(
            checkpoints.load_model(self.draft, flag="--draft", **self._load_options)
        )

    def _pack_model(self, model: Any) -> Any:
        """The model itself, which is ours to change."""
        if self.pack:
            from kvant.weights import pack

            pack(model)
        return model

    @property
    def _load_options(self) -> dict[str, Any]:
        """How models are loaded, a draft like the one that it drafts for."""
        return {
            "trust_code": self.trust_remote_code,
            "device": self.device,
            "dtype": self.dtype,
        }


@contextmanager
def open_prefixes(
    store: list[str] | None, *, quiet: bool, max_bytes: str | None = None
) -> Iterator[Any]:
    """Prefixes that are kept in a store, where one is named: all is written there in the end.

    Whoever is interrupted waits for nothing.
    """
    if not store:
        yield None
        return
    from kvant.prefixes import Prefixes

    prefixes = Prefixes(max_bytes, store=store)
    try:
        yield prefixes
        with ProgressBar("bytes for the store", quiet=quiet) as bar:
            total = prefixes.nbytes_unwritten
            while not prefixes.flush(FLUSH_POLL_S):
                bar.update(total - prefixes.nbytes_unwritten, total)
    except BaseException:
        prefixes.abandon()
        raise
    told = prefixes.stats()["store"]
    prefixes.close()
    for one in told["stores"]:
        if one["unwritten"]:
            print_note(f"warning: {one['url']} did not take {one['unwritten']} pages")
    if told["dropped"]:
        print_note(f"warning: {told['dropped']} prefixes were not written: too many waited")


def attach_model(model: Any, requested_spec: str, tokenizer: Any, guard: bool) -> Any:
    """The spec that the model is attached with; what it does to the model is said.

    So is what the dtype of its weights costs.
    """
    from kvant import probing

    warn_of_slow_weights(model, lambda line: print_note(f"warning: {line}"))
    with ProgressBar(f"trying {requested_spec}") as tried:

        def progress(done: int, total: int) -> None:
            if done == 0:  # a trial begins: its verdict was not known
                print_note(_trial_line(requested_spec, is_auto(requested_spec)))
            tried.update(done, total)

        found = probing.attach_checked(
            model, requested_spec, tokenizer, guard=guard, progress=progress
        )
    if found.spec != requested_spec:
        print_note(f"{requested_spec}: {found.spec}")
        _show_candidates(model, found)
    if found.warning is not None:
        print_note(f"warning: {found.warning}")
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

    console, table = make_table(stderr=True)
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
class CacheName:
    """What a cache is called: as it was asked for, for as long as it is stored so."""

    requested: str
    initial: str

    @classmethod
    def from_session(cls, session_options: SessionOptions, session: Any) -> CacheName:
        """Of a session that begins, or goes on from a file."""
        begun = read_spec(session)
        found = session_options.load is not None or is_auto(session_options.spec)
        return cls(begun if found else session_options.spec, begun)

    def find_current(self, session: Any) -> str:
        stored = read_spec(session)
        return self.requested if stored == self.initial else stored


def read_spec(session: Any) -> str:
    return describe_spec(session.cache.spec) or "raw"  # where no layer has rows


@dataclass
class PrintedReply:
    """What was generated, and when."""

    text: str = ""
    num_tokens: int = 0
    first_token_seconds: float = 0.0  # seconds to the first token
    decode_seconds: float = 0.0  # seconds for the others
    finish_reason: str | None = None

    def print_steps(self, steps: Iterator[Any], bar: ProgressBar, prefix: str, quiet: bool) -> None:
        """Print text as it comes, behind `before`."""
        begin = time.perf_counter()
        for step in steps:
            now = time.perf_counter() - begin
            if self.num_tokens == 0:
                self.first_token_seconds = now
                bar.stop()
                if not quiet:
                    print(prefix, end="")
            self.text += step.text
            self.num_tokens += 1
            self.decode_seconds = now - self.first_token_seconds
            self.finish_reason = step.finish_reason
            if not quiet:
                print(step.text, end="", flush=True)
        if not quiet:
            print()

    def summarize(self) -> dict[str, Any]:
        speed = (
            (self.num_tokens - 1) / self.decode_seconds
            if self.decode_seconds > 0 and self.num_tokens > 1
            else None
        )
        return {
            "tokens": self.num_tokens,
            "seconds_to_first": self.first_token_seconds,
            "tokens_a_second": speed,
            "finish_reason": self.finish_reason,
        }

    def format_line(self, spec: str, session: Any) -> str:
        """For people: how fast, and on how much."""
        cache = session.stats()
        speed = self.summarize()["tokens_a_second"]
        told = "" if speed is None else f", {speed:.1f} a second"
        if restored := cache["tokens_restored"]:
            told += f", {restored} of all prompts from the store"
        return (
            f"{format_count(self.num_tokens, 'token')}{told}, the first after "
            f"{self.first_token_seconds:.2f} s; "
            f"{spec}: {format_count(cache['length'], 'token')} held in {describe_memory(session)}"
        )


def describe_memory(session: Any) -> str:
    """Its memory beside that of a raw cache: 1.2 MiB, 0.31 of raw."""
    from kvant.planner import plan

    cache = session.stats()
    length, nbytes = cache["length"], cache["nbytes"]
    raw = plan(session.prefiller.decoder.model, "raw", context=length).nbytes if length else 0
    if not raw:
        return format_size(nbytes)
    saved = f", {format_size(raw - nbytes)} saved" if nbytes < raw else ""
    return f"{format_size(nbytes)}, {nbytes / raw:.2f} of raw{saved}"


def describe_recodes(recoded: Sequence[dict[str, Any]]) -> list[str]:
    """For people: how what is stored became smaller, a line a step."""
    return [
        f"at {step['length']} tokens: {step['from']} to {step['to']}, "
        f"{format_size(step['nbytes_before'])} to {format_size(step['nbytes_after'])}"
        for step in recoded
    ]


def print_note(line: str) -> None:
    """Something beside the text."""
    print(line, file=sys.stderr)
