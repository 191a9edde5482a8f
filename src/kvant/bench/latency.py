"""What one more token costs, against the length of what is there.

Every candidate is brought to a length with the tokens of a text, then the next tokens of the text
are read one at a time, by all candidates in turn: medians of those last `repeats` tokens up to the
length. Nothing is rewound between them: memory that grew for a token would be there already for the
next, and growing is part of what is measured. One token in 64 also seals a page: a median does not
show that, tokens a second do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvant.bench.candidates import Candidate, Make
from kvant.bench.report import progress

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
