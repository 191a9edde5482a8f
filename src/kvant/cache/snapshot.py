"""An attention layer as canonical rows and integers, and back; what does not fit is refused.

Anybody can write a file, so nothing of a snapshot is believed: all of its integers, and the shapes
of all of its tensors, are compared with each other and with the recipe before anything is taken.
What a restored layer takes is then bounded by the tensors themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvant.cache.checks import is_row_dtype
from kvant.cache.storage import Geometry, Storage, retile
from kvant.contracts import Snapshot, Tiles
from kvant.errors import SnapshotMismatch
from kvant.page_table import (
    FIRST_OPEN,
    FIRST_SEALED,
    FIRST_VISIBLE,
    LENGTH,
    PADDING,
    PRUNED_AT,
    STOP_SEALED,
    Bools,
    Ints,
    LayerGroup,
    PageTable,
)
from kvant.recipes import LayerSpec

NUMBERS_KEY = "numbers"  # the tensor of integers: one row a table, as an Extent has them
TABLES_KEY = "heads"  # tables of a sequence, where a layer prunes
MAX_POSITION = 1 << 53  # no overflow where positions are counted
MAX_TABLE_ENTRIES = (
    1 << 24
)  # entries of a table of pages, which has one for those that are gone, too


def snapshot_layer(storage: Storage | None, page_table: PageTable | None) -> Snapshot:
    """The rows and pages of a layer, in the order of their sequences and positions."""
    if storage is None or page_table is None or not page_table.num_columns:
        return Snapshot({}, {})
    tensors: dict[str, Tensor] = {NUMBERS_KEY: torch.from_numpy(canonicalize_numbers(page_table))}
    sealed = _make_index(page_table.list_sealed_slots(), storage.geometry.device)
    for name, stored in storage.sides.items():
        tensors[f"{name}.open"] = gather_open_rows(stored.open, page_table)
        for field, tensor in stored.sealed.items():
            key = f"{name}.{field}"
            tensors[key] = retile(key, tensor[sealed], stored.tiles, None)
    return Snapshot(
        tensors,
        {TABLES_KEY: page_table.tables_per_sequence}
        if page_table.layer_group.per_head_layer is not None
        else {},
    )


class ParsedLayer(NamedTuple):
    """What a snapshot says of an attention layer, once all of it was compared."""

    numbers: Ints  # of the tables
    tables_per_sequence: int  # tables of a sequence
    geometry: Geometry
    open_page_rows: list[int]  # the rows of each open page
    num_sealed: int  # pages

    def matches_sequences(self, other: ParsedLayer) -> bool:
        """Are these the same sequences?"""
        return self.tables_per_sequence == other.tables_per_sequence and np.array_equal(
            self.numbers, other.numbers
        )


def parse_layer(
    spec: LayerSpec, layer_group: LayerGroup, snapshot: Snapshot, num_separate_pages: int = 0
) -> ParsedLayer | None:
    """What a snapshot holds, or an error; so many of its pages come apart. None: no tokens."""
    if not snapshot.tensors and not snapshot.numbers:
        return None
    expected_numbers = {TABLES_KEY} if layer_group.per_head_layer is not None else set[str]()
    if snapshot.numbers.keys() != expected_numbers:
        raise SnapshotMismatch(f"numbers {sorted(snapshot.numbers)}: {sorted(expected_numbers)}")
    heads = snapshot.numbers.get(TABLES_KEY, 1)
    numbers = _parse_numbers(snapshot, spec, layer_group)
    _check_heads(numbers, heads)
    geometry = _parse_geometry(spec, snapshot)
    if layer_group.per_head_layer is not None and geometry.heads != 1:
        raise SnapshotMismatch(f"{geometry.heads} key heads in the pages of one")
    rows_apart, sealed_apart = (
        (0, num_separate_pages) if layer_group.seals else (num_separate_pages * layer_group.page, 0)
    )
    opened, sealed = _count_pages(
        numbers, layer_group, len(snapshot.tensors["keys.open"]) + rows_apart
    )
    rows = sum(opened) - rows_apart
    expected = {NUMBERS_KEY}
    for name, dim in geometry.dims.items():
        expected.add(f"{name}.open")
        _check_tensor(snapshot, f"{name}.open", (rows, geometry.heads, dim), geometry.dtypes[name])
        for field, (shape, dtype) in geometry.fields(spec, name).items():
            expected.add(f"{name}.{field}")
            _check_tensor(snapshot, f"{name}.{field}", (sealed - sealed_apart, *shape), dtype)
    if extra := set(snapshot.tensors) - expected:
        raise SnapshotMismatch(f"unknown tensors {sorted(extra)}")
    for name, codec in spec.sides.items():  # refuses another width
        codec.frame.transform_rows(snapshot.tensors[f"{name}.open"][None, :0].transpose(1, 2))
    return ParsedLayer(numbers, heads, geometry, opened, sealed)


def restore_storage(
    spec: LayerSpec, parsed: ParsedLayer, snapshot: Snapshot, tiles: Tiles | None
) -> Storage:
    """A storage of its own with what a snapshot holds, pages in order."""
    storage = Storage(spec, parsed.geometry, tiles)
    storage.ensure_slots(len(parsed.open_page_rows), parsed.num_sealed)
    for name, stored in storage.sides.items():
        _fill_pages(stored.open, snapshot.tensors[f"{name}.open"], parsed.open_page_rows)
        for field, tensor in stored.sealed.items():
            key = f"{name}.{field}"
            retile(key, snapshot.tensors[key], None, stored.tiles, tensor[: parsed.num_sealed])
    return storage


def gather_open_rows(
    tensor: Tensor, page_table: PageTable, page_mask: Bools | None = None
) -> Tensor:
    """The rows [n, H, D] of open pages, of all or of those that are wanted."""
    which, number = page_table.list_open_pages()
    if page_mask is not None:
        which, number = which[page_mask], number[page_mask]
    page = page_table.layer_group.page
    count = np.minimum(page_table.seq_lens[which] - number * page, page)
    filled = torch.from_numpy(np.arange(page) < count[:, None]).to(tensor.device)
    return tensor[_make_index(page_table.open_table[which, number], tensor.device)].transpose(1, 2)[
        filled
    ]


def canonicalize_numbers(page_table: PageTable) -> Ints:
    """The numbers, without what an empty range happens to begin at.

    The last one is left out where no rows were pruned, as it was before there was one.
    """
    numbers = page_table.numbers.copy()
    empty = numbers[:, FIRST_SEALED] >= numbers[:, STOP_SEALED]
    numbers[empty, FIRST_SEALED : STOP_SEALED + 1] = 0
    idle = (
        numbers[:, FIRST_VISIBLE]
        <= np.where(empty, numbers[:, FIRST_OPEN], numbers[:, FIRST_SEALED])
        * page_table.layer_group.page
    )
    numbers[idle & (page_table.pruned_at == 0), FIRST_VISIBLE] = 0
    return numbers if page_table.pruned_at.any() else numbers[:, :PRUNED_AT]


def _check_heads(numbers: Ints, heads: int) -> None:
    """Are the tables of a sequence equally far?"""
    if heads < 1 or len(numbers) % heads:
        raise SnapshotMismatch(f"{len(numbers)} tables of {heads} a sequence")
    alike = numbers[:, (LENGTH, PADDING, PRUNED_AT)].reshape(-1, heads, 3)
    if (alike != alike[:, :1]).any():
        raise SnapshotMismatch(f"heads of one sequence at lengths {alike[:, :, 0].tolist()}")


def _parse_numbers(snapshot: Snapshot, spec: LayerSpec, layer_group: LayerGroup) -> Ints:
    """The integers, each within what the others and the recipe allow."""
    tensor = snapshot.tensors.get(NUMBERS_KEY)
    widths = (PRUNED_AT,) if layer_group.pruning is None else (PRUNED_AT, PRUNED_AT + 1)
    if tensor is None or tensor.ndim != 2 or tensor.shape[1] not in widths or not len(tensor):
        raise SnapshotMismatch(f"{NUMBERS_KEY} is missing, or not [sequences, {PRUNED_AT}]")
    if tensor.dtype != torch.int64:
        raise SnapshotMismatch(f"{NUMBERS_KEY} is {tensor.dtype}, torch.int64 is needed")
    numbers = np.zeros((len(tensor), PRUNED_AT + 1), np.int64)
    numbers[:, : tensor.shape[1]] = tensor.cpu().numpy()
    for row in numbers.tolist():
        _check_sequence(row, spec, layer_group)
    longest = int(numbers[:, LENGTH].max())
    if (pages := len(numbers) * -(-longest // layer_group.page)) > MAX_TABLE_ENTRIES:
        raise SnapshotMismatch(
            f"{len(numbers)} sequences of up to {longest} tokens need tables of {pages} pages, "
            f"{MAX_TABLE_ENTRIES} at most: larger pages, or fewer sequences at once, need less"
        )
    return numbers


def _check_sequence(row: list[int], spec: LayerSpec, layer_group: LayerGroup) -> None:
    """Are the rows that the next query needs all there, and nothing else?"""
    length, padding, first, stop, opened, begins, pruned = row
    if not all(0 <= n <= MAX_POSITION for n in row[1:]) or not -padding <= length <= MAX_POSITION:
        raise SnapshotMismatch(f"numbers {row}: 0 to {MAX_POSITION} is needed, padding aside")
    rows, page = max(length, 0), layer_group.page
    due, low = layer_group.paging.count_due_pages(rows), spec.retention.find_first_retained(rows)
    if pruned:
        if layer_group.pruning is None or not begins < pruned <= rows:
            raise SnapshotMismatch(f"rows from {begins} on, pruned at {pruned} of {rows} tokens")
        low = begins
    if spec.capacity is not None and rows > spec.capacity:
        raise SnapshotMismatch(f"{rows} tokens for a capacity of {spec.capacity}")
    if (first or stop) and (first >= stop or stop != due):
        raise SnapshotMismatch(f"sealed pages from {first} to {stop}, {due} are due at {rows}")
    if first == stop and due > max(low // page, layer_group.num_sink_pages):
        raise SnapshotMismatch(f"no sealed pages, {due} are due at {rows}")
    if opened > max(due, low // page) or opened * page > rows:
        raise SnapshotMismatch(f"open pages from {opened} on, {due} are due at {rows}")
    given = max((first if first < stop else opened) * page, begins)
    if given > low and given > layer_group.sinks:  # sinks are there, and may reach to the others
        raise SnapshotMismatch(f"rows from {given} on, those from {low} on are needed")


def _count_pages(
    numbers: Ints, layer_group: LayerGroup, num_open_rows: int
) -> tuple[list[int], int]:
    """The rows of each open page, which are so many in all, and the number of sealed pages."""
    counts: list[int] = []
    sealed = 0
    for length, _, first, stop, begin, *_ in numbers.tolist():
        sealed += stop - first
        end = -(-max(length, 0) // layer_group.page)
        sinks = min(layer_group.num_sink_pages, begin, end)
        if (sinks + end - begin - 1) * layer_group.page > num_open_rows:  # before they are listed
            raise SnapshotMismatch(
                f"{num_open_rows} open rows, of {sinks + end - begin} pages and more"
            )
        pages = [*range(sinks), *range(begin, end)]
        counts += [min(length - number * layer_group.page, layer_group.page) for number in pages]
    return counts, sealed


def _fill_pages(target: Tensor, rows: Tensor, row_counts: list[int]) -> None:
    """Rows [R, H, D] that follow one another, into pages [slots, H, P, D]."""
    place = 0
    for slot, count in enumerate(row_counts):
        target[slot, :, :count] = rows[place : place + count].transpose(0, 1)
        place += count


def _parse_geometry(spec: LayerSpec, snapshot: Snapshot) -> Geometry:
    """What the open rows say of all others."""
    rows = {}
    for name in spec.sides:
        tensor = snapshot.tensors.get(f"{name}.open")
        if tensor is None or tensor.ndim != 3 or not is_row_dtype(tensor.dtype):
            raise SnapshotMismatch(f"{name}.open is missing or no [rows, H, D] of floats")
        if 0 in tensor.shape[1:]:
            raise SnapshotMismatch(f"{name}.open is {list(tensor.shape)}: only rows may be 0")
        if spec.dtype not in (None, tensor.dtype):
            raise SnapshotMismatch(f"{name}.open is {tensor.dtype}, the spec says {spec.dtype}")
        rows[name] = tensor.transpose(0, 1)[None]
    width = rows["keys"].shape[3]
    if spec.value_dim is not None and spec.value_dim > width:
        raise SnapshotMismatch(f"values of {spec.value_dim} channels inside keys of {width}")
    return Geometry.from_rows(rows)


def _check_tensor(
    snapshot: Snapshot, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = snapshot.tensors.get(name)
    if tensor is None:
        raise SnapshotMismatch(f"{name} is missing")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise SnapshotMismatch(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, {dtype} {list(shape)} is needed"
        )


def _make_index(slots: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(slots).to(device)
