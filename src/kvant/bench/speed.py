"""Measure how fast candidates continue a text: whole generations, and single tokens at a length.

`measure_generations` reports the time to the first token and tokens per second. All candidates
generate the same number of tokens, one token each in turn, so that other load on the machine
affects all of them. Figures are medians of several runs and count all tokens, also those that grow
the cache or seal a page. `vs_NAME` is the speed relative to NAME.

`measure_latencies` reports the time of one more token at several lengths. Each candidate is filled
to a length with the tokens of a text. Then the next `repeats` tokens are fed one at a time, each
candidate in turn, and their median is taken. Nothing is rewound in between: growth of the cache is
part of the figure. One token in 64 also seals a page, which a median does not show, but tokens per
second do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvant.bench.candidates import NO_CACHE, TRANSFORMERS, MakeCandidate, SequenceCacheCandidate
from kvant.bench.report import show_progress

BASELINES = (NO_CACHE, TRANSFORMERS)


class CandidateGeneration:
    """One generation of a candidate, and its times."""

    def __init__(self, candidate: SequenceCacheCandidate, prompt: Sequence[int]) -> None:
        self.candidate = candidate
        self.decode_seconds = 0.0  # of the tokens after the first
        start = time.perf_counter()
        self._token = candidate.feed(prompt)
        self.first_token_seconds = time.perf_counter() - start

    def step(self) -> None:
        start = time.perf_counter()
        self._token = self.candidate.feed([self._token])
        self.decode_seconds += time.perf_counter() - start


@dataclass
class GenerationRuns:
    """The times of all generations of a candidate; the last token is not in the cache."""

    num_tokens: int
    first_token_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    nbytes: int = 0

    def add(self, generation: CandidateGeneration) -> None:
        self.first_token_seconds.append(generation.first_token_seconds)
        self.decode_seconds.append(generation.decode_seconds)
        self.nbytes = generation.candidate.nbytes

    @property
    def tokens_per_second(self) -> float:
        return (self.num_tokens - 1) / statistics.median(self.decode_seconds)

    def summarize(self) -> dict[str, Any]:
        return {
            "first_ms": statistics.median(self.first_token_seconds) * 1e3,
            "tokens_s": self.tokens_per_second,
            "cache_kib": self.nbytes / 1024,
        }


def measure_generations(
    makes: Mapping[str, MakeCandidate], prompt: Sequence[int], tokens: int, num_runs: int
) -> list[dict[str, Any]]:
    """Return a row for each candidate."""
    run_generations(makes, prompt, 2)  # warm-up
    runs = {name: GenerationRuns(tokens) for name in makes}
    for turn in range(num_runs):
        show_progress(f"generation {turn + 1} of {num_runs}")
        for name, generation in run_generations(makes, prompt, tokens).items():
            runs[name].add(generation)
    show_progress("")
    return [
        {"cache": name} | run.summarize() | compute_ratios(run, runs) for name, run in runs.items()
    ]


def run_generations(
    makes: Mapping[str, MakeCandidate], prompt: Sequence[int], tokens: int
) -> dict[str, CandidateGeneration]:
    """Run one generation of each candidate, a token each in turn."""
    generations = {name: CandidateGeneration(make(), prompt) for name, make in makes.items()}
    for _ in range(tokens - 1):
        for generation in generations.values():
            generation.step()
    return generations


def compute_ratios(
    run: GenerationRuns, runs_by_name: Mapping[str, GenerationRuns]
) -> dict[str, float]:
    baselines = (name for name in BASELINES if name in runs_by_name)
    return {
        f"vs_{name}": run.tokens_per_second / runs_by_name[name].tokens_per_second
        for name in baselines
    }


WARMUP_TOKENS = 2  # per candidate and length, before the timed tokens
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def check_lengths(lengths: Sequence[int], repeats: int) -> None:
    """Raise if two lengths are too close for the tokens that are fed one at a time."""
    num_single = WARMUP_TOKENS + repeats
    for previous, length in zip([0, *lengths], lengths, strict=False):
        if length <= previous + num_single:
            raise ValueError(
                f"--lengths: {length} after {previous}, and {num_single} tokens are read one at a "
                "time: give lengths that are further apart, or fewer --repeats"
            )


def measure_latencies(
    makes: Mapping[str, MakeCandidate], text: Sequence[int], lengths: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each length and candidate."""
    candidates = {name: make() for name, make in makes.items()}
    rows: list[dict[str, Any]] = []
    previous = 0
    for length in lengths:
        show_progress(f"latency at {length} tokens")
        start = length - WARMUP_TOKENS - repeats
        for candidate in candidates.values():
            candidate.feed(text[previous:start])
        seconds = time_tokens_in_turn(candidates, text[start:length])
        rows += [
            {"length": length, "cache": name} | summarize_seconds(times)
            for name, times in seconds.items()
        ]
        previous = length
    show_progress("")
    return rows


def time_tokens_in_turn(
    candidates: Mapping[str, SequenceCacheCandidate], tokens: Sequence[int]
) -> dict[str, list[float]]:
    """Return the seconds of each token after the warm-up, by candidate."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for token in tokens:
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate.feed([token])
            seconds[name].append(time.perf_counter() - start)
    return {name: times[WARMUP_TOKENS:] for name, times in seconds.items()}


def summarize_seconds(seconds: Sequence[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(seconds) * 1e3, "best_ms": min(seconds) * 1e3}


def make_latency_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the median milliseconds by candidate and length."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        curves.setdefault(row["cache"], {})[row["length"]] = row["median_ms"]
    return curves


def make_latency_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a table with a column per length and a bar curve; all curves share a scale."""
    top = max(row["median_ms"] for row in rows)
    return [
        {"cache": name, **{str(n): ms for n, ms in curve.items()}, "curve": format_bars(curve, top)}
        for name, curve in make_latency_curves(rows).items()
    ]


def format_bars(curve: Mapping[int, float], top: float) -> str:
    return "".join(BARS[min(len(BARS) - 1, int(ms / top * len(BARS)))] for ms in curve.values())
