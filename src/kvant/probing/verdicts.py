"""Decide whether a format is harmful, on as few tokens as possible and within a time limit.

A trial compares the predictions of a raw cache with those of a cache of the format. Up to `begin`
no page is sealed and both would be equal, so only the raw cache reads. At `begin` it is forked, and
the fork is recoded; then both read the same text:

    0            begin            judged_from                    count
    |--- raw ----|--- raw and spec ----|--- decide on these tokens ---|

From `judged_from` on, about half of the rows or more are sealed. The text is read in pieces. The
time of a piece predicts that of the next; a piece that would miss the deadline is not started.

Verdicts are stored on disk, so that no format is tried on a model twice. The key of a verdict is a
hash of the weights, the configuration, the format, the text and the version of the trial. At most
1 MiB of each weight is hashed, spread evenly over it. This is enough, because training changes all
values of a weight; it takes tenths of a second for a model of 14 GiB. If a file cannot be read, the
trial is run again; if it cannot be written, the verdict is used but not stored.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from itertools import chain, repeat
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf import has_hooks, make_comparable, named_attributes, named_modules
from kvant.probing.divergence import (
    Divergence,
    compare_logits,
    compute_logits,
    make_empty_cache,
)
from kvant.recipes import CacheSpec, iterate_attention
from kvant.weights.packing import named_weights

FIRST_PIECES = (4, 16, 44, 64)  # tokens of the first pieces
PIECE_TOKENS = 128  # tokens of the others
MIN_JUDGED = 64  # positions from `judged_from` on that a decision needs
NUM_STANDARD_ERRORS = 3.0  # distance of the mean from the limit that a decision needs

ProbeProgress = Callable[[int, int], None]  # steps done, and all steps


def ignore_progress(done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Verdict:
    """The result of a trial, after all or some of its tokens."""

    harmless: bool | None  # None: unknown, the time was not enough
    mean_kl: float  # nats, over the tokens read
    top1: float  # share of these whose most likely token stays
    tokens: int
    total: int
    details: str = ""  # of a harmful format: what it changes, and what to take instead

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Verdict:
        """Parse a stored verdict; raise if one of its fields is invalid."""
        if fields["harmless"] not in (True, False):
            raise ValueError(f"harmless={fields['harmless']!r}: true or false is needed")
        numbers = float(fields["mean_kl"]), float(fields["top1"])
        counts, details = (int(fields["tokens"]), int(fields["total"])), str(fields["details"])
        return cls(bool(fields["harmless"]), *numbers, *counts, details)


def assess(
    model: PreTrainedModel,
    ids: Tensor,
    spec: CacheSpec,
    max_kl: float,
    *,
    seconds: float = math.inf,
    progress: ProbeProgress = ignore_progress,
) -> Verdict:
    """Read the text [1, T] until the verdict is certain, the text ends or the time is up."""
    deadline = monotonic() + seconds
    begin, judged_from = _find_sealed_positions(spec)
    count = ids.shape[1] - 1
    raw_cache, spec_cache = make_empty_cache(model, "raw"), None
    parts: list[Divergence] = []
    num_read, token_seconds = 0, 0.0  # token_seconds: predicted for a token of one cache
    sizes = chain(FIRST_PIECES, repeat(PIECE_TOKENS))
    progress(0, count)
    while num_read < count:
        size = min(next(sizes), (begin if num_read < begin else count) - num_read, count - num_read)
        caches = 1 if num_read < begin else 2
        start = monotonic()
        if num_read and start + token_seconds * size * caches > deadline:
            return _make_verdict(None, parts, num_read, count)
        piece = ids[:, num_read : num_read + size]
        targets = ids[0, num_read + 1 : num_read + size + 1]
        if caches == 2 and spec_cache is None:
            spec_cache = raw_cache.fork()
            spec_cache.recode(make_empty_cache(model, spec).spec)  # with fitted channel scales
        raw_logits = compute_logits(model, piece, raw_cache)
        if spec_cache is not None:
            spec_logits = compute_logits(model, piece, spec_cache)
            parts.append(compare_logits(raw_logits, spec_logits, targets))
        # The first piece also loads the weights: predict as many seconds for the whole second.
        token_seconds = (monotonic() - start) / ((size if num_read else FIRST_PIECES[1]) * caches)
        num_read += size
        progress(num_read, count)
        if parts:
            harmless = _decide(parts, judged_from - begin, num_read, max_kl)
            if harmless is not None:
                return _make_verdict(harmless, parts, num_read, count)
    verdict = _make_verdict(None, parts, num_read, count)
    return _make_verdict(verdict.mean_kl <= max_kl, parts, num_read, count)


def _find_sealed_positions(spec: CacheSpec) -> tuple[int, int]:
    """Return the positions where sealed rows first exist, and where half of the rows are."""
    pagings = [layer.paging for layer in iterate_attention(*spec.layers) if layer.seals]
    firsts = [max(p.page + (p.tail or 0), p.dense_until) - 1 for p in pagings]
    halves = [p.page + 2 * (p.tail or 0) - 1 for p in pagings]
    return min(firsts), max(*firsts, *halves)


def _decide(parts: list[Divergence], first: int, num_read: int, max_kl: float) -> bool | None:
    """Return whether the format is harmless; None if the mean is too close to the limit."""
    kl = torch.cat([part.kl for part in parts])
    if kl.isinf().any():
        return False
    judged = kl[first:].double()
    if len(judged) < MIN_JUDGED:
        return None
    mean = float(judged.mean())
    error = NUM_STANDARD_ERRORS * float(judged.std()) / math.sqrt(len(judged))
    if mean + error <= max_kl:
        return True
    # The warning names the mean over all tokens read: it must exceed the limit, too.
    return False if min(mean - error, float(kl.sum()) / num_read) > max_kl else None


def _make_verdict(
    harmless: bool | None, parts: list[Divergence], num_read: int, total: int
) -> Verdict:
    """Make a verdict; its means are over all tokens read, those before `begin` counted as equal."""
    if not parts:
        return Verdict(harmless, 0.0, 1.0, num_read, total)
    divergence = Divergence.concatenate(parts)
    share = divergence.num_positions / num_read
    top1 = 1 - (1 - divergence.top1) * share
    return Verdict(harmless, divergence.mean_kl * share, top1, num_read, total)


KEY_VERSION = "kvant verdict 5"  # change it if trials give other results or texts
MAX_FILES = 256
NUM_SLICES, SLICE_NBYTES = 256, 4096  # the slices of a large weight that are hashed

T = TypeVar("T")

log = logging.getLogger("kvant")


def get_folder() -> Path:
    """Return $XDG_CACHE_HOME/kvant/verdicts, or ~/.cache/kvant/verdicts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "kvant" / "verdicts"


def make_key(model: PreTrainedModel, ids: Tensor, *parts: object) -> str | None:
    """Return the key of a verdict; `parts` are hashed, too.

    None: the output is not determined by what is hashed, as in training mode or with hooks.
    """
    if any(module.training or has_hooks(module) for _, module in named_modules(model)) or any(
        tensor.is_meta for _, tensor in _iterate_tensors(model)
    ):
        return None
    settings = json.dumps(model.config.to_dict(), sort_keys=True, default=repr)
    attributes = [(name, make_comparable(value)) for name, value in named_attributes(model)]
    identity = (
        KEY_VERSION,
        version("kvant"),
        type(model).__qualname__,
        settings,
        attributes,
        model.device.type,
    )
    digest = blake2b(repr((identity, ids.tolist(), parts)).encode(), digest_size=32)
    for name, tensor in _iterate_tensors(model):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample_bytes(tensor))
    return digest.hexdigest()


def _iterate_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from named_weights(model)
    yield from model.named_buffers()
    for name, value in named_attributes(model):
        if isinstance(value, Tensor):
            yield name, value


@torch.no_grad()
def sample_bytes(tensor: Tensor) -> bytes:
    """Return all bytes of a small tensor, and evenly spread slices of a large one."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) > NUM_SLICES * SLICE_NBYTES:
        begins = [
            index * (len(flat) - SLICE_NBYTES) // (NUM_SLICES - 1) for index in range(NUM_SLICES)
        ]
        flat = torch.cat([flat[begin : begin + SLICE_NBYTES] for begin in begins])
    return flat.cpu().numpy().tobytes()


def load(key: str | None, parse: Callable[[Any], T]) -> T | None:
    """Load a verdict; return None if there is no file that `parse` accepts."""
    if key is None:
        return None
    # Missing file or home folder, invalid JSON, fields missing, of another type or out of range.
    with suppress(OSError, ValueError, RuntimeError, LookupError, TypeError):
        return parse(json.loads((get_folder() / f"{key}.json").read_text(encoding="utf-8")))
    return None


def store(key: str | None, verdict: dict[str, Any]) -> None:
    """Write a verdict atomically; delete the oldest files beyond `MAX_FILES`."""
    if key is None:
        return
    try:
        folder = get_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
            try:
                json.dump(verdict, file)
                file.close()
                os.replace(file.name, folder / f"{key}.json")
            except BaseException:
                os.unlink(file.name)
                raise
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[MAX_FILES:]:
            path.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        log.info("the verdict on a format could not be stored: %s", error)
