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

from kvant.bench.candidates import NO_CACHE, TRANSFORMERS, MakeCandidate, SequenceCacheCandidate
from kvant.bench.report import show_progress

BASELINES = (NO_CACHE, TRANSFORMERS)


class CandidateGeneration:
    """A candidate on its way, and what it took so far."""

    def __init__(self, candidate: SequenceCacheCandidate, prompt: Sequence[int]) -> None:
        self.candidate = candidate
        self.decode_seconds = 0.0  # seconds after the first token
        begin = time.perf_counter()
        self._token = candidate.feed(prompt)
        self.first_token_seconds = time.perf_counter() - begin

    def step(self) -> None:
        begin = time.perf_counter()
        self._token = self.candidate.feed([self._token])
        self.decode_seconds += time.perf_counter() - begin


@dataclass
class GenerationRuns:
    """What each generation of one candidate took; its memory lacks the last token then."""

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
    """A row for each candidate."""
    run_generations(makes, prompt, 2)  # what a first forward does once for all is not timed
    found = {name: GenerationRuns(tokens) for name in makes}
    for turn in range(num_runs):
        show_progress(f"generation {turn + 1} of {num_runs}")
        for name, done in run_generations(makes, prompt, tokens).items():
            found[name].add(done)
    show_progress("")
    return [
        {"cache": name} | run.summarize() | compute_ratios(run, found)
        for name, run in found.items()
    ]


def run_generations(
    makes: Mapping[str, MakeCandidate], prompt: Sequence[int], tokens: int
) -> dict[str, CandidateGeneration]:
    """One generation of each candidate."""
    going = {name: CandidateGeneration(make(), prompt) for name, make in makes.items()}
    for _ in range(tokens - 1):
        for one in going.values():
            one.step()
    return going


def compute_ratios(
    run: GenerationRuns, runs_by_name: Mapping[str, GenerationRuns]
) -> dict[str, float]:
    known = (name for name in BASELINES if name in runs_by_name)
    return {
        f"vs_{name}": run.tokens_per_second / runs_by_name[name].tokens_per_second for name in known
    }


WARMUP_TOKENS = 2  # tokens that each candidate reads at a length before it is timed
BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def check_lengths(lengths: Sequence[int], repeats: int) -> None:
    """Between two lengths there must be as many tokens as are read one at a time."""
    need = WARMUP_TOKENS + repeats
    for before, length in zip([0, *lengths], lengths, strict=False):
        if length <= before + need:
            raise ValueError(
                f"--lengths: {length} after {before}, and {need} tokens are read one at a time: "
                "give longer lengths, each more than that above the one before, or fewer --repeats"
            )


def measure_latencies(
    makes: Mapping[str, MakeCandidate], text: Sequence[int], lengths: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """A row for each length and candidate."""
    candidates = {name: make() for name, make in makes.items()}
    rows: list[dict[str, Any]] = []
    done = 0
    for length in lengths:
        show_progress(f"latency at {length} tokens")
        begin = length - WARMUP_TOKENS - repeats
        for candidate in candidates.values():
            candidate.feed(text[done:begin])
        seconds = time_tokens_in_turn(candidates, text[begin:length])
        rows += [
            {"length": length, "cache": name} | summarize_seconds(s) for name, s in seconds.items()
        ]
        done = length
    show_progress("")
    return rows


def time_tokens_in_turn(
    candidates: Mapping[str, SequenceCacheCandidate], tokens: Sequence[int]
) -> dict[str, list[float]]:
    """Seconds for each token after the first few, by candidate."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for token in tokens:
        for name, candidate in candidates.items():
            begin = time.perf_counter()
            candidate.feed([token])
            seconds[name].append(time.perf_counter() - begin)
    return {name: found[WARMUP_TOKENS:] for name, found in seconds.items()}


def summarize_seconds(seconds: Sequence[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(seconds) * 1e3, "best_ms": min(seconds) * 1e3}


def make_latency_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Candidate to length to median milliseconds."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(row["cache"], {})[row["length"]] = row["median_ms"]
    return found


def make_latency_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A table with a column for each length, and a curve; all curves have one scale, from 0 on."""
    top = max(row["median_ms"] for row in rows)
    return [
        {"cache": name, **{str(n): ms for n, ms in curve.items()}, "curve": format_bars(curve, top)}
        for name, curve in make_latency_curves(rows).items()
    ]


def format_bars(curve: Mapping[int, float], top: float) -> str:
    return "".join(BARS[min(len(BARS) - 1, int(ms / top * len(BARS)))] for ms in curve.values())
