"""Time to the first token and tokens a second, of candidates that each continue one prompt.

Whole generations, a token each in turn, so that what else the machine does hits all; several times
over, medians. Every candidate makes the same number of tokens and stops at none. All tokens count:
those that grow the memory or seal a page too. `vs_NAME` is tokens a second over those of NAME.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvant.bench.candidates import NONE, TRANSFORMERS, Candidate, Make
from kvant.bench.report import progress

BASELINES = (NONE, TRANSFORMERS)


class Generation:
    """A candidate on its way, and what it took so far."""

    def __init__(self, candidate: Candidate, prompt: Sequence[int]) -> None:
        self.candidate = candidate
        self.rest = 0.0  # seconds after the first token
        begin = time.perf_counter()
        self._token = candidate.feed(prompt)
        self.first = time.perf_counter() - begin

    def step(self) -> None:
        begin = time.perf_counter()
        self._token = self.candidate.feed([self._token])
        self.rest += time.perf_counter() - begin


@dataclass
class Runs:
    """What each generation of one candidate took; its memory lacks the last token then."""

    tokens: int
    first: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    nbytes: int = 0

    def add(self, done: Generation) -> None:
        self.first.append(done.first)
        self.rest.append(done.rest)
        self.nbytes = done.candidate.nbytes

    @property
    def speed(self) -> float:
        return (self.tokens - 1) / statistics.median(self.rest)

    def figures(self) -> dict[str, Any]:
        return {
            "first_ms": statistics.median(self.first) * 1e3,
            "tokens_s": self.speed,
            "cache_kib": self.nbytes / 1024,
        }


def streams(
    makes: Mapping[str, Make], prompt: Sequence[int], tokens: int, runs: int
) -> list[dict[str, Any]]:
    """A row for each candidate."""
    generate(makes, prompt, 2)  # what a first forward does once for all is not timed
    found = {name: Runs(tokens) for name in makes}
    for turn in range(runs):
        progress(f"generation {turn + 1} of {runs}")
        for name, done in generate(makes, prompt, tokens).items():
            found[name].add(done)
    progress("")
    return [{"cache": name} | run.figures() | ratios(run, found) for name, run in found.items()]


def generate(
    makes: Mapping[str, Make], prompt: Sequence[int], tokens: int
) -> dict[str, Generation]:
    """One generation of each candidate."""
    going = {name: Generation(make(), prompt) for name, make in makes.items()}
    for _ in range(tokens - 1):
        for one in going.values():
            one.step()
    return going


def ratios(run: Runs, found: Mapping[str, Runs]) -> dict[str, float]:
    known = (name for name in BASELINES if name in found)
    return {f"vs_{name}": run.speed / found[name].speed for name in known}
