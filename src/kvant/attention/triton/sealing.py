"""Rows on their way into pages: one kernel copies them, another seals to the codec's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.triton.forms import (
    DTYPES,
    MAX_DIM,
    Half,
    aligned,
    beginning,
    beside,
    constant,
    known,
    pages,
    power,
    records,
    rows,
    table,
    third,
    unread,
)
from kvant.codecs.codebook import boundaries
from kvant.contracts import Fields, Stored
from kvant.extent import Change, Ints
from kvant.launches import on
from kvant.modes import no_inference_mode

ROWS = 16  # a program


def unstored(change: Change, rows: Fields, sides: Mapping[str, Stored]) -> bool:
    """Is this left to others? Rows that are sealed, and those that are only copied."""
    for name, side in sides.items():
        came = rows[name]
        if type(side.open) is not Tensor or type(came) not in (Tensor, torch.nn.Parameter):
            return True
        if came.dtype != side.open.dtype or came.dtype not in DTYPES:
            return True
    return len(change.seals) > 0 and any(_unsealed(side) for side in sides.values())


def _unsealed(side: Stored) -> bool:
    """Sums in an order of halves must divide into them."""
    page, dim = side.open.shape[2:]
    if unread(side.codec) is not None or side.tiles is not None or page % ROWS:
        return True
    uneven = known(side.codec).kind == "codebook" and dim & (dim - 1)
    return dim % 16 != 0 or dim > MAX_DIM or bool(uneven)


@dataclass(frozen=True)
class Entries:
    """What a change does to every layer, on the device: as kernels/store.py has it."""

    writes: Tensor  # [n, 6]: copies of pages that are begun, and rows that came
    most: int  # rows of one of them
    seals: Tensor  # [n, 6]

    @classmethod
    def of(cls, change: Change, page: int, device: torch.device) -> Entries:
        key = ("entries", device)
        found: Entries | None = change.memo.get(key)
        if found is None:
            writes, seals = _writes(change, page), _seals(change, page)
            both = torch.from_numpy(np.concatenate([writes, seals])).to(device)
            most = int(writes[:, 2].max(initial=0))
            found = cls(both[: len(writes)], most, both[len(writes) :])
            change.memo[key] = found
        return found


def _writes(change: Change, page: int) -> Ints:
    copies, writes = change.copies, change.writes
    found = np.zeros((len(copies) + len(writes), 6), np.int64)
    found[: len(copies), 0], found[: len(copies), 3] = copies[:, 1], copies[:, 0]
    # Of a page that is copied as rows are added to it, the rows before those: all at a time.
    found[: len(copies), 2] = page
    to, at = np.nonzero(copies[:, 1:] == writes[:, 1])
    found[to, 2] = writes[at, 2]
    added = found[len(copies) :]
    added[:, :3], added[:, 3], added[:, 4:] = writes[:, 1:4], -1, writes[:, [0, 4]]
    return found


def _seals(change: Change, page: int) -> Ints:
    found = np.zeros((len(change.seals), 6), np.int64)
    found[:, 0], found[:, 2], found[:, 3] = change.seals[:, 1], page, change.seals[:, 2]
    found[:, 4:] = change.seals[:, [0, 3]]
    return found


def stored(change: Change, came: Fields, sides: Mapping[str, Stored]) -> None:
    """Copy and write the rows of all sides in one launch, and seal each in one."""
    first = next(iter(sides.values())).open
    entries = Entries.of(change, first.shape[2], first.device)
    came = {name: beside(came[name]) for name in sides}
    with on(first.device):
        ways = tuple(way(side.open, side.open, came[name]) for name, side in sides.items())
        _put(ways, entries.writes, entries.most)
        if len(entries.seals):
            for name, side in sides.items():
                _seal(side, came[name], entries.seals)


def way(to: Tensor, opened: Tensor, came: Tensor) -> Any:
    """From open pages, or from where rows came, into pages."""
    dim = to.shape[3]
    fixed = dim, power(dim), aligned(opened) and aligned(came)
    return records().Way(rows(to), rows(opened), rows(came), *map(constant, fixed))


def _put(ways: tuple[Any, ...], entries: Tensor, most: int) -> None:
    from kvant.attention.triton.kernels import store

    if len(entries) == 0:
        return
    heads = ways[0].to.data.shape[1]
    block = min(power(most), ROWS)
    store.put[len(entries) * heads, -(-most // block)](ways, entries, HEADS=heads, ROWS=block)


def _seal(side: Stored, came: Tensor, entries: Tensor) -> None:
    from kvant.attention.triton.kernels import store

    form, (heads, page, dim) = known(side.codec), side.open.shape[1:]
    if form.kind == "raw":
        _put((way(side.sealed["rows"], side.open, came),), entries, page)
        return
    kinds = beginning(form, dim, side.open.dtype, side.open.is_cpu)[0]
    numbers = pages(Half(form, side.open, side.sealed))
    cuts = side.sealed["scale"]
    if form.kind == "codebook":
        numbers = numbers._replace(levels=table(form.bits, dim, torch.float32, came.device))
        cuts = _boundaries(form.bits, dim, came.device)
    store.seal[len(entries) * heads, page // ROWS](
        way(side.open, side.open, came),
        entries,
        numbers,
        cuts,
        kinds,
        third(dim) if form.kind == "codebook" and form.bits == 3 else kinds,
        HEADS=heads,
        PAGE=page,
        DIM=dim,
        CORRECTED=form.corrected,
        ROWS=ROWS,
        enable_fp_fusion=False,  # which rounds otherwise than the codecs do
    )


@lru_cache(maxsize=64)
def _boundaries(bits: int, dim: int, device: torch.device) -> Tensor:
    with no_inference_mode():
        return torch.tensor(boundaries(bits, dim).astype(np.float32), device=device)
