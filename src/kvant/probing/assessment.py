"""Whether a format does harm, found out on as few tokens as that takes, and within seconds.

A raw cache reads the text. Where a first page falls due, a fork of it is recoded and reads on
beside it: before, both see the same rows. Pieces grow, so that the seconds of the next one are
known from the last one, and none is begun that would not end in time.

    0            begin            judged_from                    count
    |--- raw ----|--- raw and spec ----|--- bounds are of these ---|
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.probing.divergence import (
    MAX_COMPARED_POSITIONS,
    Divergence,
    compare_logits,
    compute_logits,
    make_empty_cache,
    make_stored_prefill_spec,
)
from kvant.recipes import CacheSpec, iterate_attention

FIRST = (4, 16, 44, 64)  # tokens of the first pieces
PIECE = 128  # and of the others
MIN_JUDGED = 64  # positions before a verdict may be clear
ERRORS = 3.0  # standard errors between the mean and what is tolerated, for a clear verdict

ProbeProgress = Callable[[int, int], None]  # steps done, and all that there are


def ignore_progress(done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Verdict:
    """What is known of a format after some tokens of a trial."""

    harmless: bool | None  # None: unknown, the seconds were not enough
    mean_kl: float  # nats, over the tokens that were read
    top1: float  # share of them whose likeliest token stays
    tokens: int
    total: int

    @classmethod
    def from_json(cls, fields: Any) -> Verdict:
        """Parse a verdict that was kept; an error where one of its fields is wrong."""
        if fields["harmless"] not in (True, False):
            raise ValueError(f"harmless={fields['harmless']!r}: true or false is needed")
        numbers = float(fields["mean_kl"]), float(fields["top1"])
        return cls(bool(fields["harmless"]), *numbers, int(fields["tokens"]), int(fields["total"]))


def assess(
    model: PreTrainedModel,
    ids: Tensor,
    spec: CacheSpec,
    max_kl: float,
    *,
    seconds: float,
    progress: ProbeProgress,
) -> Verdict:
    """Read the text [1, T] until the verdict is clear, at its end, or out of time."""
    deadline = monotonic() + seconds
    begin, judged_from = _first_sealed(spec)
    count = ids.shape[1] - 1
    raw, ours = make_empty_cache(model, make_stored_prefill_spec(model, "raw")), None
    parts: list[Divergence] = []
    read, pace = 0, 0.0  # pace: seconds a token of one cache takes, at most
    sizes = chain(FIRST, repeat(PIECE))
    progress(0, count)
    while read < count:
        size = min(next(sizes), (begin if read < begin else count) - read, count - read)
        caches = 1 if read < begin else 2
        now = monotonic()
        if read and now + pace * size * caches > deadline:
            return _verdict(None, parts, read, count)
        piece, targets = ids[:, read : read + size], ids[0, read + 1 : read + size + 1]
        if caches == 2 and ours is None:
            ours = raw.fork()
            ours.recode(make_empty_cache(model, spec).spec)  # with what is fitted to the model
        right = compute_logits(model, piece, raw)
        if ours is not None:
            parts += _measure_divergences(right, compute_logits(model, piece, ours), targets)
        # The first piece reads the weights for the first time: the next may take as long again.
        pace = (monotonic() - now) / ((size if read else FIRST[1]) * caches)
        read += size
        progress(read, count)
        if parts and (harmless := _clear(parts, judged_from - begin, read, max_kl)) is not None:
            return _verdict(harmless, parts, read, count)
    found = _verdict(None, parts, read, count)
    return _verdict(found.mean_kl <= max_kl, parts, read, count)


def _first_sealed(spec: CacheSpec) -> tuple[int, int]:
    """Positions from which on a row is seen sealed, and at least half of all rows are."""
    pages = [layer.paging for layer in iterate_attention(*spec.layers) if layer.seals]
    firsts = [max(one.page + (one.tail or 0), one.dense_until) - 1 for one in pages]
    halves = [one.page + 2 * (one.tail or 0) - 1 for one in pages]
    return min(firsts), max(*firsts, *halves)


def _measure_divergences(right: Tensor, logits: Tensor, targets: Tensor) -> list[Divergence]:
    slices = (
        slice(at, at + MAX_COMPARED_POSITIONS)
        for at in range(0, len(targets), MAX_COMPARED_POSITIONS)
    )
    return [compare_logits(right[here], logits[here], targets[here]) for here in slices]


def _clear(parts: list[Divergence], first: int, read: int, max_kl: float) -> bool | None:
    """Harmless or not, where the mean is that far from what is tolerated; else None."""
    kl = torch.cat([part.kl for part in parts])
    if kl.isinf().any():
        return False
    judged = kl[first:].double()
    if len(judged) < MIN_JUDGED:
        return None
    mean, error = float(judged.mean()), ERRORS * float(judged.std()) / math.sqrt(len(judged))
    if mean + error <= max_kl:
        return True
    # What a warning names is the mean over all tokens that were read: it has to be too much, too.
    return False if min(mean - error, float(kl.sum()) / read) > max_kl else None


def _verdict(harmless: bool | None, parts: list[Divergence], read: int, total: int) -> Verdict:
    """The means count tokens that see no sealed row yet, as the whole text has them too."""
    if not parts:
        return Verdict(harmless, 0.0, 1.0, read, total)
    found = Divergence.concatenate(parts)
    share = found.num_positions / read
    return Verdict(harmless, found.mean_kl * share, 1 - (1 - found.top1) * share, read, total)
