"""The record that rows are appended to: the one that is there, or an empty one of their shapes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvant.contracts import Fields, Tally, Tiles
from kvant.layers.geometry import Geometry
from kvant.layers.record import Record
from kvant.layers.rows import padding
from kvant.recipes import LayerSpec


def admitting(
    old: Record | None,
    rows: Fields,
    start: Sequence[int] | Tensor | None,
    spec: LayerSpec,
    tiles: Tiles | None,
    tally: Tally,
) -> Record:
    """One that these rows fit, or a ValueError; a layer without tokens takes any shape."""
    given = None if start is None else padding(start)
    if old is not None and old.length:
        if not old.memory.geometry.fits(rows):
            raise _unlike(Geometry.of(rows), old.memory.geometry)
        if given not in (None, old.memory.start):
            raise ValueError(f"start {given} for sequences that began at {old.memory.start}")
        return old
    geometry = Geometry.of(rows)
    given = given or (0,) * geometry.batch
    if len(given) != geometry.batch or min(given) < 0:
        raise ValueError(f"start {given}: one number >= 0 for each of {geometry.batch}")
    if old is not None and (old.memory.geometry, old.memory.start) == (geometry, given):
        return old
    return Record.fresh(spec, geometry, tiles, tally, given)


def _unlike(new: Geometry, old: Geometry) -> ValueError:
    said = f"rows of {new} for a layer of {old}"
    if new.batch != old.batch:
        said += (
            ": a cache keeps the sequences that it began with, which can be repeated or selected; "
            "caches cannot be joined: read the prompts as one left-padded batch, or keep a cache "
            "for each"
        )
    return ValueError(said)
