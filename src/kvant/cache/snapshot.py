"""Take and restore snapshots: the rows, pages and integers of a layer or of a whole cache.

Rows and pages are ordered by sequence and position, whatever slots hold them.

Snapshots come from files, so they are untrusted. All integers and tensor shapes are compared with
each other and with the recipe before anything is allocated. The memory of a restored layer is then
bounded by the size of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvant.cache.checks import is_row_dtype
from kvant.cache.layout import AttentionLeaf, CacheLayout
from kvant.cache.recurrent import StateHistory, restore_history, snapshot_history
from kvant.cache.state import CacheState
from kvant.cache.transitions import Transition
from kvant.contracts import ExternalState, Snapshot
from kvant.errors import SnapshotMismatch
from kvant.page_table import (
    FIRST_OPEN,
    FIRST_SEALED,
    FIRST_VISIBLE,
    LENGTH,
    NO_SLOTS,
    PADDING,
    PRUNED_AT,
    STOP_SEALED,
    Bools,
    Ints,
    LayerGroup,
    PageTable,
)
from kvant.pages.advance import allocate_table
from kvant.pages.pool import CachePools
from kvant.pages.storage import Geometry, Storage, retile
from kvant.recipes import LayerSpec

NUMBERS_KEY = "numbers"  # the tensor of `PageTable.numbers`, not the integers of `Snapshot.numbers`
TABLES_KEY = "heads"  # tables per sequence, of a layer with a table per head
MAX_POSITION = 1 << 53  # no overflow in arithmetic on positions
MAX_TABLE_ENTRIES = 1 << 24  # of a page table, which has entries for released pages as well


def snapshot_layer(
    storage: Storage | None,
    page_table: PageTable | None,
    open_mask: Bools | None = None,
    *,
    include_sealed: bool = True,
) -> Snapshot:
    """Return the rows and pages of a layer, ordered by sequence and position.

    `open_mask` selects open pages. Without `include_sealed`, tensors of sealed pages are empty.
    """
    if storage is None or page_table is None or not page_table.num_columns:
        return Snapshot({}, {})
    tensors: dict[str, Tensor] = {NUMBERS_KEY: torch.from_numpy(_canonicalize_numbers(page_table))}
    sealed_slots = page_table.list_sealed_slots() if include_sealed else NO_SLOTS[1]
    sealed = _make_index(sealed_slots, storage.geometry.device)
    for name, stored in storage.sides.items():
        tensors[f"{name}.open"] = _gather_open_rows(stored.open, page_table, open_mask)
        for field, tensor in stored.sealed.items():
            key = f"{name}.{field}"
            tensors[key] = retile(key, tensor[sealed], stored.tiles, None)
    has_per_head_tables = page_table.layer_group.per_head_layer is not None
    numbers = {TABLES_KEY: page_table.tables_per_sequence} if has_per_head_tables else {}
    return Snapshot(tensors, numbers)


class ParsedLayer(NamedTuple):
    """The validated contents of an attention layer in a snapshot."""

    numbers: Ints  # `PageTable.numbers`
    tables_per_sequence: int
    geometry: Geometry
    open_page_rows: list[int]  # rows of each open page
    num_sealed: int  # pages

    def matches_sequences(self, other: ParsedLayer) -> bool:
        """Return whether both layers have the same sequences."""
        return self.tables_per_sequence == other.tables_per_sequence and np.array_equal(
            self.numbers, other.numbers
        )


def parse_layer(
    spec: LayerSpec, layer_group: LayerGroup, snapshot: Snapshot, num_separate_pages: int = 0
) -> ParsedLayer | None:
    """Validate the snapshot of a layer; return None if it has no tokens.

    The snapshot omits `num_separate_pages` of its full pages, which are stored separately.
    """
    if not snapshot.tensors and not snapshot.numbers:
        return None
    expected_numbers = {TABLES_KEY} if layer_group.per_head_layer is not None else set[str]()
    if snapshot.numbers.keys() != expected_numbers:
        raise SnapshotMismatch(
            f"numbers {sorted(snapshot.numbers)}: {sorted(expected_numbers)} are needed"
        )
    tables_per_sequence = snapshot.numbers.get(TABLES_KEY, 1)
    numbers = _parse_numbers(snapshot, spec, layer_group)
    _check_heads(numbers, tables_per_sequence)
    geometry = _parse_geometry(spec, snapshot)
    if layer_group.per_head_layer is not None and geometry.heads != 1:
        raise SnapshotMismatch(f"{geometry.heads} key heads in pages of a single head")
    separate_rows, separate_sealed = (
        (0, num_separate_pages) if layer_group.seals else (num_separate_pages * layer_group.page, 0)
    )
    open_page_rows, num_sealed = _count_pages(
        numbers, layer_group, len(snapshot.tensors["keys.open"]) + separate_rows
    )
    num_rows = sum(open_page_rows) - separate_rows
    expected = {NUMBERS_KEY}
    for name, dim in geometry.dims.items():
        expected.add(f"{name}.open")
        _check_tensor(
            snapshot, f"{name}.open", (num_rows, geometry.heads, dim), geometry.dtypes[name]
        )
        for field, (shape, dtype) in geometry.fields(spec, name).items():
            expected.add(f"{name}.{field}")
            _check_tensor(
                snapshot, f"{name}.{field}", (num_sealed - separate_sealed, *shape), dtype
            )
    if extra := set(snapshot.tensors) - expected:
        raise SnapshotMismatch(f"unknown tensors {sorted(extra)}")
    for name, codec in spec.sides.items():  # raises for a wrong width
        codec.frame.transform_rows(snapshot.tensors[f"{name}.open"][None, :0].transpose(1, 2))
    return ParsedLayer(numbers, tables_per_sequence, geometry, open_page_rows, num_sealed)


def restore_storage(leaf: AttentionLeaf, parsed: ParsedLayer, snapshot: Snapshot) -> Storage:
    """Return a new storage with the pages of a snapshot, in order."""
    storage = leaf.make_storage(parsed.geometry)
    storage.ensure_slots(len(parsed.open_page_rows), parsed.num_sealed)
    for name, stored in storage.sides.items():
        _fill_pages(stored.open, snapshot.tensors[f"{name}.open"], parsed.open_page_rows)
        for field, tensor in stored.sealed.items():
            key = f"{name}.{field}"
            retile(key, snapshot.tensors[key], None, stored.tiles, tensor[: parsed.num_sealed])
    return storage


def _gather_open_rows(tensor: Tensor, page_table: PageTable, page_mask: Bools | None) -> Tensor:
    """Return the rows [n, H, D] of open pages, of all or of those in `page_mask`."""
    tables, page_numbers = page_table.list_open_pages()
    if page_mask is not None:
        tables, page_numbers = tables[page_mask], page_numbers[page_mask]
    page = page_table.layer_group.page
    num_rows = np.minimum(page_table.seq_lens[tables] - page_numbers * page, page)
    is_row = torch.from_numpy(np.arange(page) < num_rows[:, None]).to(tensor.device)
    return tensor[
        _make_index(page_table.open_table[tables, page_numbers], tensor.device)
    ].transpose(1, 2)[is_row]


def _canonicalize_numbers(page_table: PageTable) -> Ints:
    """Return the numbers of a table, with those that have no effect set to 0.

    Omit the last column, PRUNED_AT, if no rows were pruned.
    """
    numbers = page_table.numbers.copy()
    empty = numbers[:, FIRST_SEALED] >= numbers[:, STOP_SEALED]
    numbers[empty, FIRST_SEALED : STOP_SEALED + 1] = 0
    hides_no_row = (
        numbers[:, FIRST_VISIBLE]
        <= np.where(empty, numbers[:, FIRST_OPEN], numbers[:, FIRST_SEALED])
        * page_table.layer_group.page
    )
    numbers[hides_no_row & (page_table.pruned_at == 0), FIRST_VISIBLE] = 0
    return numbers if page_table.pruned_at.any() else numbers[:, :PRUNED_AT]


def _check_heads(numbers: Ints, heads: int) -> None:
    """Refuse tables of one sequence that differ in length."""
    if heads < 1 or len(numbers) % heads:
        raise SnapshotMismatch(f"{len(numbers)} tables, {heads} per sequence")
    lengths = numbers[:, (LENGTH, PADDING, PRUNED_AT)].reshape(-1, heads, 3)
    if (lengths != lengths[:, :1]).any():
        raise SnapshotMismatch(f"heads of one sequence at lengths {lengths[:, :, 0].tolist()}")


def _parse_numbers(snapshot: Snapshot, spec: LayerSpec, layer_group: LayerGroup) -> Ints:
    """Return `PageTable.numbers`, after comparing them with each other and the recipe."""
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
    if (num_entries := len(numbers) * -(-longest // layer_group.page)) > MAX_TABLE_ENTRIES:
        raise SnapshotMismatch(
            f"{len(numbers)} sequences of up to {longest} tokens need tables of {num_entries} "
            f"pages, {MAX_TABLE_ENTRIES} at most: use larger pages, or fewer sequences"
        )
    return numbers


def _check_sequence(row: list[int], spec: LayerSpec, layer_group: LayerGroup) -> None:
    """Refuse numbers unless the rows that the next query needs, and no others, are stored."""
    length, padding, first, stop, first_open, first_visible, pruned = row
    if not all(0 <= n <= MAX_POSITION for n in row[1:]) or not -padding <= length <= MAX_POSITION:
        raise SnapshotMismatch(f"numbers {row}: 0 to {MAX_POSITION} is needed, padding aside")
    rows, page = max(length, 0), layer_group.page
    due = layer_group.paging.count_due_pages(rows)
    first_needed = spec.retention.find_first_retained(rows)
    if pruned:
        if layer_group.pruning is None or not first_visible < pruned <= rows:
            raise SnapshotMismatch(
                f"rows from {first_visible} on, pruned at {pruned} of {rows} tokens"
            )
        first_needed = first_visible
    if spec.capacity is not None and rows > spec.capacity:
        raise SnapshotMismatch(f"{rows} tokens for a capacity of {spec.capacity}")
    if (first or stop) and (first >= stop or stop != due):
        raise SnapshotMismatch(f"sealed pages from {first} to {stop}, {due} are due at {rows}")
    if first == stop and due > max(first_needed // page, layer_group.num_sink_pages):
        raise SnapshotMismatch(f"no sealed pages, {due} are due at {rows}")
    if first_open > max(due, first_needed // page) or first_open * page > rows:
        raise SnapshotMismatch(f"open pages from {first_open} on, {due} are due at {rows}")
    first_stored = max((first if first < stop else first_open) * page, first_visible)
    if first_stored > first_needed and first_stored > layer_group.sinks:  # else sinks fill the gap
        raise SnapshotMismatch(
            f"rows from {first_stored} on, those from {first_needed} on are needed"
        )


def _count_pages(
    numbers: Ints, layer_group: LayerGroup, num_open_rows: int
) -> tuple[list[int], int]:
    """Return the rows of each open page and the number of sealed pages."""
    counts: list[int] = []
    num_sealed = 0
    for length, _, first, stop, first_open, *_ in numbers.tolist():
        num_sealed += stop - first
        stop_open = -(-max(length, 0) // layer_group.page)
        num_sinks = min(layer_group.num_sink_pages, first_open, stop_open)
        if (
            num_sinks + stop_open - first_open - 1
        ) * layer_group.page > num_open_rows:  # refuse before building a huge list of pages
            raise SnapshotMismatch(
                f"{num_open_rows} open rows, for {num_sinks + stop_open - first_open} pages or more"
            )
        pages = [*range(num_sinks), *range(first_open, stop_open)]
        counts += [min(length - number * layer_group.page, layer_group.page) for number in pages]
    return counts, num_sealed


def _fill_pages(target: Tensor, rows: Tensor, row_counts: list[int]) -> None:
    """Copy consecutive rows [R, H, D] into pages [slots, H, P, D]."""
    row = 0
    for slot, count in enumerate(row_counts):
        target[slot, :, :count] = rows[row : row + count].transpose(0, 1)
        row += count


def _parse_geometry(spec: LayerSpec, snapshot: Snapshot) -> Geometry:
    """Return the number of heads, the widths and the dtypes of the open rows."""
    rows = {}
    for name in spec.sides:
        tensor = snapshot.tensors.get(f"{name}.open")
        if tensor is None or tensor.ndim != 3 or not is_row_dtype(tensor.dtype):
            raise SnapshotMismatch(f"{name}.open is missing, or not a float tensor [rows, H, D]")
        if 0 in tensor.shape[1:]:
            raise SnapshotMismatch(
                f"{name}.open is {list(tensor.shape)}: only the number of rows may be 0"
            )
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


@dataclass(frozen=True)
class ParsedSnapshot:
    """The validated contents of a snapshot."""

    layer_snapshots: Mapping[str, Snapshot]  # by leaf
    leaves: Mapping[str, ParsedLayer]  # attention leaves with tokens
    layer_groups: Mapping[int, ParsedLayer]  # one per group, in order; {}: no tokens
    histories: Sequence[StateHistory]
    external_histories: Mapping[str, Any]  # arguments of `prepare_restore`, by leaf


def take_snapshot(
    state: CacheState,
    external_states: Mapping[str, ExternalState],
    snapshot_rows: Callable[[AttentionLeaf], Snapshot],
) -> Snapshot:
    """Return a snapshot of all leaves; `snapshot_rows` takes those of attention leaves."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    for name in state.layout.names:
        leaf = state.layout.leaves.get(name)
        if leaf is None:
            part = external_states[name].shared_snapshot()
        elif isinstance(leaf, AttentionLeaf):
            part = snapshot_rows(leaf)
        else:
            part = snapshot_history(state.histories[leaf.history])
        tensors |= {f"{name}/{key}": tensor for key, tensor in part.tensors.items()}
        numbers |= {f"{name}/{key}": number for key, number in part.numbers.items()}
    return Snapshot(tensors, numbers)


def parse_snapshot(
    layout: CacheLayout,
    external_states: Mapping[str, ExternalState],
    full_snapshot: Snapshot,
    num_separate_pages: Mapping[int, int] | None = None,
) -> ParsedSnapshot:
    """Validate `full_snapshot` against the leaves of `layout`.

    `num_separate_pages` counts the full pages of each group that are not in the snapshot.
    """
    layer_snapshots = _split_snapshot(full_snapshot, layout.names)
    num_separate_pages = num_separate_pages or {}
    leaves: dict[str, ParsedLayer] = {}
    first_of_group: dict[int, ParsedLayer | None] = {}
    histories: list[StateHistory] = []
    external_histories: dict[str, Any] = {}
    for name in layout.names:
        leaf, part = layout.leaves.get(name), layer_snapshots[name]
        try:
            if leaf is None:
                external_histories[name] = external_states[name].parse_snapshot(part)
            elif not isinstance(leaf, AttentionLeaf):
                histories.append(restore_history(leaf.spec, part))
            else:
                group, count = layout.layer_groups[leaf.group], num_separate_pages.get(leaf.group)
                parsed = parse_layer(leaf.spec, group, part, count or 0)
                if parsed is not None:
                    leaves[name] = parsed
                first = first_of_group.setdefault(leaf.group, parsed)
                if (first is None) != (parsed is None) or (
                    parsed and first and not parsed.matches_sequences(first)
                ):
                    raise SnapshotMismatch(
                        "its sequences differ from those of a layer of the same kind"
                    )
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"layer {name}: {error}") from None
    groups = {
        group: parsed_layer
        for group, parsed_layer in sorted(first_of_group.items())
        if parsed_layer is not None
    }
    if len(groups) not in (0, len(first_of_group)):
        raise SnapshotMismatch("some layers have tokens, others none")
    batch_sizes = {
        len(parsed_layer.numbers) // parsed_layer.tables_per_sequence
        for parsed_layer in groups.values()
    }
    batches = sorted(batch_sizes | ({history.batch for history in histories} - {0}))
    if len(batches) > 1:
        raise SnapshotMismatch(f"layers with batches of {batches}")
    return ParsedSnapshot(layer_snapshots, leaves, groups, histories, external_histories)


def restore_state(layout: CacheLayout, parsed: ParsedSnapshot) -> Transition:
    """Return the state of a snapshot, in pools of its own."""
    pools = CachePools(layout.layer_groups)
    storages = {
        leaf.index: restore_storage(
            leaf, parsed.leaves[leaf.name], parsed.layer_snapshots[leaf.name]
        )
        for leaf in layout.attention
        if leaf.name in parsed.leaves
    }
    page_tables = tuple(
        allocate_table(
            layout.layer_groups[group],
            layer.numbers,
            pools[group],
            tables_per_sequence=layer.tables_per_sequence,
        )
        for group, layer in parsed.layer_groups.items()
    )
    state = CacheState(layout, pools, page_tables, tuple(parsed.histories), storages)
    return Transition(state, state.list_table_slots())


def _split_snapshot(snapshot: Snapshot, names: Sequence[str]) -> dict[str, Snapshot]:
    """Split a snapshot by leaf."""
    parts: dict[str, tuple[dict[str, Tensor], dict[str, int]]] = {n: ({}, {}) for n in names}
    for index, entries in enumerate((snapshot.tensors, snapshot.numbers)):
        for key, value in entries.items():
            name, _, tensor_name = key.rpartition("/")
            if name not in parts:
                raise SnapshotMismatch(f"{key} belongs to none of the layers {short(list(names))}")
            parts[name][index][tensor_name] = value  # type: ignore[assignment]
    return {name: Snapshot(*pair) for name, pair in parts.items()}
