"""Open sessions by command-line options, and print their replies: shared by `run` and `chat`.

A session is new or loaded from a file. The text of replies goes to standard output, progress and
statistics to standard error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from kvant.cli import print_note, print_table
from kvant.cli.options import (
    CacheOptions,
    check_readable,
    check_send_options,
    check_transcript,
)
from kvant.platform import c_libraries
from kvant.platform.devices import warn_of_slow_weights
from kvant.platform.figures import format_kl, format_lost, format_of_raw, format_top1
from kvant.platform.sizes import format_count, format_size, parse_size
from kvant.platform.terminal import ProgressBar
from kvant.recipes import AnySpec
from kvant.retention import DEFAULT_WINDOW_SINKS
from kvant.spec import describe_spec
from kvant.spec.language import is_auto

if TYPE_CHECKING:
    from kvant.generation import Session, Step
    from kvant.generation.decoder import TransformersDecoder
    from kvant.prefixes import Prefixes
    from kvant.probing.guard import GuardedSpec

FLUSH_POLL_S = 0.1  # between two updates of the progress bar of store writes


@dataclass(frozen=True)
class SessionOptions(CacheOptions):
    """Options that configure a session."""

    kv_window_size: Annotated[
        int | None, Option(help="Window of the last N positions to store.")
    ] = None
    kv_window_keep: Annotated[
        int | None,
        Option(
            help=f"Sinks: the first N positions, stored besides the window (default "
            f"{DEFAULT_WINDOW_SINKS})."
        ),
    ] = None
    strategy: Annotated[
        str, Option(help="When to use a cache: always, disabled, long or adaptive.")
    ] = "always"
    threshold: Annotated[int, Option(help="Number of tokens from which `long` uses a cache.")] = 512
    budget: Annotated[
        str | None, Option(help="Limit on the bytes of an `adaptive` cache: 64MiB.")
    ] = None
    prefill_chunk: Annotated[int, Option(min=1, help="Tokens per prefill step.")] = 512
    load_path: Annotated[Path | None, Option("--load", help="Saved conversation to continue.")] = (
        None
    )

    @property
    def spec(self) -> str:
        """The spec with the window flags added; raises if the spec itself sets the same option."""
        spec = super().spec
        spec_words = {word.strip().partition("=")[0] for word in spec.split(",")}
        for flag, option, value in (
            ("--kv-window-size", "window", self.kv_window_size),
            ("--kv-window-keep", "sinks", self.kv_window_keep),
        ):
            if value is None:
                continue
            if option in spec_words:
                raise ValueError(
                    f"{flag} {value} with --kv-cache {spec}, which has {option}= too: drop one"
                )
            spec += f",{option}={value}"
        has_window = self.kv_window_size is not None or "window" in spec_words
        if self.kv_window_keep is not None and not has_window:
            raise ValueError(
                f"--kv-window-keep {self.kv_window_keep} without a window: give --kv-window-size "
                "too"
            )
        return spec

    @property
    def budget_bytes(self) -> int | None:
        return None if self.budget is None else parse_size(self.budget)

    def check_session(self, send_options: Mapping[str, Any]) -> None:
        """Raise an error for invalid or conflicting options and missing files, before loading."""
        from kvant.generation.settings import check_strategy

        if self.load_path is not None:
            check_readable(self.load_path, "--load")  # first: the other checks import torch
        check_send_options(send_options, self.max_context)
        check_strategy(self.strategy, self.threshold, self.budget_bytes)
        if self.store and self.budget is not None:
            raise ValueError("--budget with --store: a store holds one format; drop one of them")
        self.check()
        if self.load_path is not None:
            self._check_file(self.load_path)

    def _check_file(self, file: Path) -> None:
        """Raise an error if an option sets the format of the file, or the model does not fit it."""
        for name in ("kv_cache", "kv_window_size", "kv_window_keep"):
            if (value := getattr(self, name)) is not None:
                flag = f"--{name.replace('_', '-')}"
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
        needs_template: bool = False,
        prefixes: Prefixes | None = None,
    ) -> Session:
        """Load the model, and start a session or resume the one of --load.

        `send_options` are the arguments for later calls of `Session.send`. They are checked before
        the model is loaded.
        """
        self.check_session(send_options)
        model, tokenizer = self.load()
        if needs_template and tokenizer.chat_template is None:
            raise ValueError(
                "--chat: this model has no chat template: drop --chat to continue the prompt as "
                "plain text"
            )
        c_libraries.keep_freed_memory()
        from kvant.generation import Session

        # `resume` replaces the spec by that of the file.
        initial_spec = "raw" if self.load_path is not None else self.spec
        session = Session(
            model,
            self.load_processor(model, tokenizer),
            attach_model(model, initial_spec, tokenizer, self.guard),
            system=system,
            template=template,
            max_context=self.max_context,
            prefill_chunk=self.prefill_chunk,
            strategy=self.strategy,
            threshold=self.threshold,
            budget=self.budget_bytes,
            draft=self.load_draft(),
            backend=self.backend,
            prefixes=prefixes,
        )
        if self.load_path is not None:
            session.resume(self.load_path)
        return session


@contextmanager
def open_prefixes(
    store: list[str] | None, *, quiet: bool, max_bytes: str | None = None
) -> Iterator[Prefixes | None]:
    """Yield prefixes with a store, or None without one.

    A normal exit writes all pages to the store. An exception, such as an interrupt, abandons the
    pending writes.
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
    """Attach a model with the requested spec, or the one that `auto` chooses; return that spec.

    Print warnings if the format harms the model, or if its weights have a slow dtype.
    """
    from kvant import probing
    from kvant.probing.guard import TRIAL_SECONDS

    announcement = (
        f"{requested_spec}: testing formats on the model; later starts reuse the result"
        if is_auto(requested_spec)
        else f"testing {requested_spec} on the model (at most {TRIAL_SECONDS:g} s; --no-guard "
        "skips it)"
    )
    warn_of_slow_weights(model, lambda line: print_note(f"warning: {line}"))
    with ProgressBar(f"testing {requested_spec}") as bar:

        def progress(done: int, total: int) -> None:
            if done == 0:  # with a cached verdict, `progress` is never called
                print_note(announcement)
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


def _show_candidates(model: Any, verdict: GuardedSpec) -> None:
    """Print the formats that `auto` tested, on standard error."""
    from kvant.planner import compute_share_of_raw

    headings = ("", "format", ">of raw", ">mean KL", ">top-1", ">recall lost", "verdict")
    rows = [
        (
            "*" if candidate.spec == verdict.spec else "",
            candidate.spec,
            format_of_raw(compute_share_of_raw(model, candidate.spec)),
            format_kl(candidate.mean_kl),
            format_top1(candidate.top1),
            "" if candidate.lost is None else format_lost(candidate.lost),
            candidate.verdict,
        )
        for candidate in verdict.candidates
    ]
    print_table(headings, rows, wrapped=["format"], stderr=True)


@dataclass(frozen=True)
class CacheName:
    """The name of a session's cache format that the output shows.

    It is the requested spec until a recode; from then on, it is the current spec.
    """

    requested: str
    initial: str  # the spec of the cache at the start

    @classmethod
    def from_session(cls, session_options: SessionOptions, session: Session) -> CacheName:
        """Name the cache of a new or loaded session."""
        initial = read_spec(session)
        # A file or `auto` chose the spec.
        is_chosen = session_options.load_path is not None or is_auto(session_options.spec)
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

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed, None for a single token."""
        if self.num_tokens < 2 or self.decode_seconds <= 0:
            return None
        return (self.num_tokens - 1) / self.decode_seconds

    def summarize(self) -> dict[str, Any]:
        return {
            "tokens": self.num_tokens,
            "seconds_to_first": self.first_token_seconds,
            "tokens_a_second": self.tokens_per_second,
            "finish_reason": self.finish_reason,
        }

    def print_stats(self, cache_name: CacheName, session: Session, num_recodes: int = 0) -> None:
        """Print the speed, the cache size, and all recodes but the first `num_recodes`."""
        cache, speed = session.stats(), self.tokens_per_second
        for line in describe_recodes(cache["recoded"][num_recodes:]):
            print_note(line)
        details = "" if speed is None else f", {speed:.1f} a second"
        if restored := cache["tokens_restored"]:
            details += f", {restored} prompt tokens from the store"
        print_note(
            f"{format_count(self.num_tokens, 'token')}{details}, the first after "
            f"{self.first_token_seconds:.2f} s; {cache_name.find_current(session)}: "
            f"{format_count(cache['length'], 'token')} in {describe_memory(session)}"
        )


def describe_memory(session: Session) -> str:
    """Format the bytes of a cache, compared with raw rows: 1.2 MiB, 0.31 of raw."""
    from kvant.planner import plan

    cache = session.stats()
    nbytes, raw_nbytes = cache["nbytes"], cache["raw_nbytes"]
    if not raw_nbytes:
        return format_size(nbytes)
    text = f"{format_size(nbytes)}, {format_of_raw(nbytes / raw_nbytes)} of raw"
    if nbytes < raw_nbytes:
        return f"{text}, {format_size(raw_nbytes - nbytes)} saved"
    decoder = cast("TransformersDecoder", session.loop.prefiller.decoder)
    saving_length = plan(decoder.model, session.cache.spec, context=1).find_saving_length()
    return text if saving_length is None else f"{text}; saves memory from {saving_length} tokens on"


def describe_recodes(recoded: Sequence[dict[str, Any]]) -> list[str]:
    """Format each recode of an adaptive cache as one line."""
    return [
        f"at {recode['length']} tokens: {recode['from']} to {recode['to']}, "
        f"{format_size(recode['nbytes_before'])} to {format_size(recode['nbytes_after'])}"
        for recode in recoded
    ]
