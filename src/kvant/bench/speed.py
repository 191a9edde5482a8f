"""How fast candidates continue a text: in whole generations, and for one more token at a length.

`streams` tells the time to the first token and tokens a second. Whole generations, a token each in
turn, so that what else the machine does hits all; several times over, medians. Every candidate
makes the same number of tokens and stops at none. All tokens count: those that grow the memory or
seal a page too. `vs_NAME` is tokens a second over those of NAME.

`latencies` tells what one more token costs, against the length of what is there. Every candidate is
brought to a length with the tokens of a text, then the next tokens of the text are read one at a
time, by all candidates in turn: medians of those last `repeats` tokens up to the length. Nothing is
rewound between them: memory that grew for a token would be there already for the next, and growing
is part of what is measured. One token in 64 also seals a page: a median does not show that, tokens
a second do.
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


FIRST = 2  # tokens that each candidate reads at a length before it is timed
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def check_lengths(lengths: Sequence[int], repeats: int) -> None:
    """Between two lengths there must be as many tokens as are read one at a time."""
    need = FIRST + repeats
    for before, length in zip([0, *lengths], lengths, strict=False):
        if length <= before + need:
            raise ValueError(
                f"--lengths: {length} after {before}, and {need} tokens are read one at a time: "
                "give longer lengths, each more than that above the one before, or fewer --repeats"
            )


def latencies(
    makes: Mapping[str, Make], text: Sequence[int], lengths: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """A row for each length and candidate."""
    candidates = {name: make() for name, make in makes.items()}
    rows: list[dict[str, Any]] = []
    done = 0
    for length in lengths:
        progress(f"latency at {length} tokens")
        begin = length - FIRST - repeats
        for candidate in candidates.values():
            candidate.feed(text[done:begin])
        seconds = in_turn(candidates, text[begin:length])
        rows += [{"length": length, "cache": name} | figures(s) for name, s in seconds.items()]
        done = length
    progress("")
    return rows


def in_turn(candidates: Mapping[str, Candidate], tokens: Sequence[int]) -> dict[str, list[float]]:
    """Seconds for each token after the first few, by candidate."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for token in tokens:
        for name, candidate in candidates.items():
            begin = time.perf_counter()
            candidate.feed([token])
            seconds[name].append(time.perf_counter() - begin)
    return {name: found[FIRST:] for name, found in seconds.items()}


def figures(seconds: Sequence[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(seconds) * 1e3, "best_ms": min(seconds) * 1e3}


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Candidate to length to median milliseconds."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(row["cache"], {})[row["length"]] = row["median_ms"]
    return found


def lines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A table with a column for each length, and a curve; all curves have one scale, from 0 on."""
    top = max(row["median_ms"] for row in rows)
    return [
        {"cache": name, **{str(n): ms for n, ms in curve.items()}, "curve": bars(curve, top)}
        for name, curve in curves(rows).items()
    ]


def bars(curve: Mapping[int, float], top: float) -> str:
    return "".join(BARS[min(len(BARS) - 1, int(ms / top * len(BARS)))] for ms in curve.values())
