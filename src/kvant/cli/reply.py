"""A reply as it comes: text on standard output, progress and figures on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvant.sizes import format_size


class Reading:
    """The progress of long work, on a terminal; it is gone when there is something to say."""

    def __init__(self, what: str = "reading the prompt", *, quiet: bool = False) -> None:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn())
        console = Console(stderr=True)
        hidden = quiet or not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task(what)

    def __enter__(self) -> Reading:
        self._bar.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


@dataclass
class Reply:
    """What was generated, and when."""

    text: str = ""
    tokens: int = 0
    first: float = 0.0  # seconds to the first token
    rest: float = 0.0  # seconds for the others
    finish_reason: str | None = None

    def take(self, steps: Iterator[Any], reading: Reading, before: str, quiet: bool) -> None:
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

    def line(self, spec: str, cache: dict[str, Any]) -> str:
        """For people: how fast, and on how much."""
        speed = self.figures()["tokens_a_second"]
        told = "" if speed is None else f", {speed:.1f} a second"
        return (
            f"{self.tokens} tokens{told}, the first after {self.first:.2f} s; "
            f"{spec}: {cache['length']} tokens held in {format_size(cache['nbytes'])}"
        )


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
