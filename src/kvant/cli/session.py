"""Open sessions by command-line options, and print their replies: shared by `run` and `chat`.

A session is new or loaded from a file. The text of replies goes to standard output, progress and
statistics to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvant import checkpoints
from kvant.cli.options import (
    check_backend,
    check_readable,
    check_send_options,
    check_transcript,
    merge_spec,
)
from kvant.platform import malloc
from kvant.platform.devices import check_device, check_dtype, warn_of_slow_weights
from kvant.platform.progress import ProgressBar
from kvant.platform.sizes import format_count, format_size, parse_size
from kvant.platform.tables import make_table
from kvant.recipes import AnySpec
from kvant.spec import describe_spec
from kvant.spec.auto import check_spec_or_auto, is_auto

if TYPE_CHECKING:
    from kvant.generation import Session, Step
    from kvant.generation.decoder import TransformersDecoder
    from kvant.prefixes import Prefixes
    from kvant.probing.guard import GuardedSpec

FLUSH_POLL_S = 0.1  # between updates of the progress of store writes


@dataclass(frozen=True)
class SessionOptions:
    """Command-line options that configure a session."""

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
        """Raise an error for invalid or conflicting options and missing files, before loading."""
        from kvant.generation.settings import check_strategy

        if self.load is not None:
            check_readable(self.load, "--load")  # first: the other checks import torch
        check_send_options(send_options, self.max_context)
        check_strategy(self.strategy, self.threshold, self.budget_bytes)
        if self.store and self.budget is not None:
            raise ValueError("--budget with --store: a store holds one format; drop one of them")
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
        """Raise an error if the file does not fit the model or another option sets its format."""
        flags = {"--kv-cache": self.kv_cache, "--kv-window-size": self.window_size}
        flags["--kv-window-keep"] = self.window_keep
        for flag, value in flags.items():
            if value is not None:
                raise ValueError(
                    f"{flag} {value} with --load: the file has its own format; drop {flag}"
                )
        check_transcript(file, self.model)

    def open_session(
        self,
        send_options: Mapping[str, Any],
        *,
        template: bool,
        system: str | None = None,
        prefixes: Prefixes | None = None,
    ) -> Session:
        """Load the model, and start a session or resume the one of --load.

        `send_options` are the later arguments of `Session.send`, checked before loading.
        """
        self.check(send_options)
        model, tokenizer = checkpoints.load(self.model, **self._load_options)
        if self.chat and tokenizer.chat_template is None:
            raise ValueError(
                "--chat: this model has no chat template: drop --chat to continue the prompt as "
                "plain text"
            )
        self._pack_model(model)
        malloc.keep_freed_memory()
        from kvant.generation import Session

        initial_spec = "raw" if self.load is not None else self.spec
        spec = attach_model(model, initial_spec, tokenizer, self.guard)
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
        """Pack the weights in place unless --no-pack, and return the model."""
        if self.pack:
            from kvant.weights.packing import pack

            pack(model)
        return model

    @property
    def _load_options(self) -> dict[str, Any]:
        """Options for loading the model and its draft."""
        return {
            "trust_code": self.trust_remote_code,
            "device": self.device,
            "dtype": self.dtype,
        }


@contextmanager
def open_prefixes(
    store: list[str] | None, *, quiet: bool, max_bytes: str | None = None
) -> Iterator[Prefixes | None]:
    """Open prefixes with a store, None without one; write all pages to it on a normal exit.

    An exception, such as an interrupt, abandons pending writes instead.
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
    store_stats = prefixes.stats()["store"]
    prefixes.close()
    for tier in store_stats["stores"]:
        if tier["unwritten"]:
            print_note(f"warning: {tier['unwritten']} pages were not written to {tier['url']}")
    if store_stats["dropped"]:
        print_note(
            f"warning: {store_stats['dropped']} prefixes were not written: the queue was full"
        )


def attach_model(model: Any, requested_spec: str, tokenizer: Any, guard: bool) -> AnySpec:
    """Attach a model with a spec, and return the spec, which `auto` chooses.

    Prints warnings if the format harms the model or its weights have a slow dtype.
    """
    from kvant import probing

    warn_of_slow_weights(model, lambda line: print_note(f"warning: {line}"))
    with ProgressBar(f"testing {requested_spec}") as bar:

        def progress(done: int, total: int) -> None:
            if done == 0:  # called only if no verdict is cached
                print_note(_describe_test(requested_spec, is_auto(requested_spec)))
            bar.update(done, total)

        verdict = probing.attach_checked(
            model, requested_spec, tokenizer, guard=guard, progress=progress
        )
    if verdict.spec != requested_spec:
        print_note(f"{requested_spec}: {verdict.spec}")
        _show_candidates(model, verdict)
    if verdict.warning is not None:
        print_note(f"warning: {verdict.warning}")
    return verdict.spec


def _describe_test(spec: str, auto: bool) -> str:
    """Announce the test of a spec, with its time limit."""
    from kvant.probing.guard import TRIAL_SECONDS

    if auto:
        return f"{spec}: testing formats on the model, the smallest first"
    return f"testing {spec} on the model (at most {TRIAL_SECONDS:g} s; --no-guard skips it)"


def _show_candidates(model: Any, verdict: GuardedSpec) -> None:
    """Print the formats that `auto` tested, on standard error."""
    from kvant.planner import plan

    console, table = make_table(stderr=True)
    for heading in ("", "format", "bytes a token", "KL", "top-1", "recall lost", "verdict"):
        table.add_column(heading, no_wrap=True)
    for candidate in verdict.candidates:
        mark = "*" if candidate.spec == verdict.spec else ""
        nbytes = plan(model, candidate.spec, context=1).nbytes_per_token
        cells = (
            f"{nbytes:.0f}",
            f"{candidate.mean_kl:.2g}",
            f"{candidate.top1:.1%}",
            "" if candidate.lost is None else f"{candidate.lost:.2g}",
            candidate.verdict,
        )
        table.add_row(mark, candidate.spec, *cells)
    console.print(table)


@dataclass(frozen=True)
class CacheName:
    """The name of a session's cache format in output.

    It is the spec that was requested, as long as the cache is still stored in it.
    """

    requested: str
    initial: str  # the spec of the cache at the start

    @classmethod
    def from_session(cls, session_options: SessionOptions, session: Session) -> CacheName:
        """Name the cache of a new or loaded session."""
        initial = read_spec(session)
        is_chosen = session_options.load is not None or is_auto(session_options.spec)
        return cls(initial if is_chosen else session_options.spec, initial)

    def find_current(self, session: Session) -> str:
        """Return the requested spec, or the current one after a recode."""
        current = read_spec(session)
        return self.requested if current == self.initial else current


def read_spec(session: Session) -> str:
    return describe_spec(session.cache.spec) or "raw"  # empty if no layer stores rows


@dataclass
class PrintedReply:
    """A reply while it is generated and printed, with its timing."""

    text: str = ""
    num_tokens: int = 0
    first_token_seconds: float = 0.0  # from the start to the first token
    decode_seconds: float = 0.0  # from the first token to the last
    finish_reason: str | None = None

    def print_steps(
        self, steps: Iterator[Step], bar: ProgressBar, prefix: str, quiet: bool
    ) -> None:
        """Print `prefix` and then the text of each step as it is generated."""
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

    def format_line(self, spec: str, session: Session) -> str:
        """Format the speed of the reply and the size of the cache as one line."""
        cache = session.stats()
        speed = self.summarize()["tokens_a_second"]
        details = "" if speed is None else f", {speed:.1f} a second"
        if restored := cache["tokens_restored"]:
            details += f", {restored} prompt tokens from the store"
        return (
            f"{format_count(self.num_tokens, 'token')}{details}, the first after "
            f"{self.first_token_seconds:.2f} s; "
            f"{spec}: {format_count(cache['length'], 'token')} in {describe_memory(session)}"
        )


def describe_memory(session: Session) -> str:
    """Format the bytes of a cache, compared with a raw one: 1.2 MiB, 0.31 of raw."""
    from kvant.planner import plan

    cache = session.stats()
    length, nbytes = cache["length"], cache["nbytes"]
    decoder = cast("TransformersDecoder", session.loop.prefiller.decoder)
    raw_nbytes = plan(decoder.model, "raw", context=length).nbytes if length else 0
    if not raw_nbytes:
        return format_size(nbytes)
    saved = f", {format_size(raw_nbytes - nbytes)} saved" if nbytes < raw_nbytes else ""
    return f"{format_size(nbytes)}, {nbytes / raw_nbytes:.2f} of raw{saved}"


def describe_recodes(recoded: Sequence[dict[str, Any]]) -> list[str]:
    """Format each recode of an adaptive cache as one line."""
    return [
        f"at {recode['length']} tokens: {recode['from']} to {recode['to']}, "
        f"{format_size(recode['nbytes_before'])} to {format_size(recode['nbytes_after'])}"
        for recode in recoded
    ]


def print_note(line: str) -> None:
    """Print a line to standard error: standard output is for generated text."""
    print(line, file=sys.stderr)
