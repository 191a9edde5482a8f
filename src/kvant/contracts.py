"""The nouns of kvant: read this first.

Three sentences carry the design.

1. The tokens of a layer live in pages of P rows. The newest pages are open: dense, private,
   written to. Older ones are sealed: encoded once and never changed again.
2. A codec seals a page; a retention rule says which rows may go. Neither knows the other.
3. Attention receives rows with their positions, and derives every mask from positions.

A row is one head's key or value for one token. Rows come as [B, H, T, D]. A column is the index
of a token in the padded batch; its position in sequence b is `column - start[b]`, so padding has
negative positions. Sequences that are not padded have one index for both.

One step: `cache[layer].append(k, v)` frames and stores the rows and returns a View; then
`attend(q, view)` picks a Backend and hands it a Request; once every layer has its rows, the Ledger
lets all commit. Query heads come in groups: `group` of them share one key head. The seam of a query
is the column from which on it reads dense rows, and below which sealed ones.

This module holds protocols and plain values; recipes.py says how a cache is described. It knows
no codec, no layer, no backend.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kvant.extent import Extent, Paging

Fields = Mapping[str, Tensor]
Order = Literal["BHTD", "BTHD"]


class Frame(Protocol):
    """The invertible map A, over the last dimension, that rows are stored under.

    `rows(k) . queries(q) == k . q`, and `outputs(rows(v)) == v`: kernels never see a frame.
    """

    @property
    def trivial(self) -> bool:
        """A is 1: everything stays as it comes."""
        return False

    def rows(self, x: Tensor) -> Tensor:
        """A x, for keys and values [..., H, T, D] on their way in."""

    def queries(self, q: Tensor) -> Tensor:
        """A^-T q, for queries [..., H * group, T, D]; in float32 or wider, unless A is 1.

        It may enlarge a query beyond what its 16 bits hold, and rounding would cost bits.
        """

    def outputs(self, x: Tensor) -> Tensor:
        """A^-1 x, for whatever leaves: attention outputs, and rows that are read back."""


@dataclass(frozen=True)
class Field:
    """One named part of a sealed page: `width` values a row, or once a page."""

    dtype: torch.dtype | None  # None: whatever the rows come in
    width: int
    per_page: bool = False

    def height(self, page: int) -> int:
        return 1 if self.per_page else page


@dataclass(frozen=True)
class Form:
    """What the bytes of a sealed row mean: all that a kernel knows of a codec."""

    kind: Literal["raw", "affine", "codebook", "float"]
    bits: int = 0
    group: int = 0  # values that a scale covers; 0: the row
    corrected: bool = False  # is a scale fitted to the codes that were found?


class Codec(Protocol):
    """Seals pages of dense rows into named fields and opens them again; a frozen dataclass.

    Rows arrive framed. `seal` is deterministic and page by page: leading dimensions are
    independent, so any pages may be sealed in any order and together.
    """

    @property
    def frame(self) -> Frame: ...
    @property
    def exact(self) -> bool:
        """Sealing changes no byte: then pages need not be sealed at all."""
        return False

    @property
    def limit(self) -> float:
        """The largest magnitude it stores: finite values beyond become that."""
        return math.inf

    @property
    def tail(self) -> int:
        """How many of the last rows are seen dense unless the spec says otherwise."""
        return 0

    @property
    def form(self) -> Form | None:
        """What kernels read it as; None: they do not know it."""
        return None

    def fields(self, dim: int) -> Mapping[str, Field]:
        """What a page of rows of `dim` values becomes. Refuses a `dim` it cannot store."""

    def seal(self, rows: Tensor) -> Fields:
        """[..., P, dim] -> {name: [..., P or 1, width]}."""

    def open(self, fields: Fields) -> Tensor:
        """The rows again, [..., P, dim], in float32 (raw rows: as they are)."""


class Retention(Protocol):
    """Says, from integers alone, which rows must stay."""

    @property
    def window(self) -> int | None:
        """How many of the last rows a query sees; None: all."""

    @property
    def sinks(self) -> int:
        """How many of the first rows of a sequence always stay, dense."""

    def keep(self, length: int) -> int:
        """The first row, sinks aside, that must stay once `length` tokens were seen."""

    def reachable(self, to: int, first: int) -> int:
        """The longest length <= `to` that rows from `first` on can still serve."""


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, as a rule over positions."""

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None  # a query sees its own block of `chunk` positions only

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("sinks", 0), ("chunk", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} of a mask: {least} or more is needed")


class Tiles(Protocol):
    """How the bytes of a sealed page lie in memory. Only an arena and a backend know of it."""

    def pack(self, name: str, field: Tensor) -> Tensor:
        """[..., rows, width] in canonical order -> the same shape and bytes, rearranged.

        The name says the side too, as in "keys.codes".
        """

    def unpack(self, name: str, field: Tensor) -> Tensor: ...


class Arena(Protocol):
    """Where units (pages, or single rows) of one layer live, numbered from 0 on.

    A unit lies in a slot; which one is the arena's business. What is alive is said by a `Span`.
    """

    @property
    def nbytes(self) -> int:
        """Bytes allocated. What is reserved but never touched does not count."""

    @property
    def unit_nbytes(self) -> int: ...
    def allocate(self, first: int, live: int, stop: int) -> None:
        """Make room for units [first, stop), keeping what [first, live) holds."""

    def close_up(self, first: int, live: int, stop: int) -> None:
        """Move [first, live) where the same memory has room up to `stop`, if it has any.

        What was given out of their tensors is theirs no more: for memory whose address has to stay.
        """

    def nbytes_for(self, first: int, live: int, stop: int) -> int:
        """Bytes allocated once `allocate` made this room."""

    def adopt(self, first: int, units: Fields, stop: int) -> None:
        """Hold [first, stop) in the room it would have taken to grow there from nothing."""

    def hold(self, first: int, units: Fields, stop: int) -> None:
        """Hold [first, stop) in no more room than that, whatever growing would take."""

    def write(self, first: int, units: Fields) -> None: ...
    def tensors(self, first: int, stop: int) -> Fields:
        """Units [first, stop) without a copy."""

    def located(self, first: int) -> tuple[Fields, int]:
        """The tensors that units lie in, and the slot of unit `first`."""

    def slots(self) -> Fields:
        """Everything, slot by slot, whatever sequence it belongs to: [slots, ...]."""

    def table(self, first: int, stop: int) -> Tensor:
        """The slots of units [first, stop) of every sequence, [B, n]."""

    def share(self, first: int, stop: int) -> Arena:
        """An arena with the same units, independent of this one from now on."""

    def select(self, index: Tensor, first: int, stop: int) -> Arena:
        """An arena of its own with the sequences `index`."""

    def moved(self, device: torch.device, first: int, stop: int) -> Arena:
        """An arena of its own with the same units, in the memory of another device."""

    def release(self, first: int, stop: int) -> Arena:
        """Only [first, stop) is still needed: this arena, or a smaller one."""


@dataclass
class Tally:
    """What happened to one layer, for `stats()`."""

    appends: int = 0
    rewinds_exact: int = 0
    rewinds_decoded: int = 0
    attended: Counter[str] = field(default_factory=Counter)  # backend -> calls
    sealed: Counter[str] = field(default_factory=Counter)  # backend -> pages
    clamped: int | Tensor = 0  # values beyond the limit of their codec, where they were counted
    told: set[str] = field(default_factory=set)  # what was warned of; one set for a whole cache

    def add(self, other: Tally) -> None:
        self.appends += other.appends
        self.rewinds_exact += other.rewinds_exact
        self.rewinds_decoded += other.rewinds_decoded
        self.attended.update(dict(other.attended))  # a copy: other threads may be counting
        self.sealed.update(dict(other.sealed))
        self.clamped += int(other.clamped)


@dataclass(frozen=True)
class Side:
    """The keys, or the values, of a view, in the frame of their codec."""

    codec: Codec
    sealed: Fields  # name: [slots, H, P or 1, width]
    room: Tensor  # [B, H, slots, D]: where dense rows lie, one behind the other
    slot: int  # of the first of them
    count: int
    sinks: Tensor  # [B, H, S, D]: positions [0, S)

    @cached_property
    def dense(self) -> Tensor:
        """Columns [dense_from, length), [B, H, count, D]."""
        return self.room.narrow(2, self.slot, self.count)


@dataclass(frozen=True)
class View:
    """Pages and positions of one layer as attention may read them, until its next append.

    Sealed page `first_page + i` of sequence b lies in slot `page_table[b, i]`. A column may be
    both sealed and dense; which of the two a query at column p sees is said by `seam(p)`.
    The parts never come and go, they may be empty. Positions below `sinks.shape[2]` are to be
    read from the sinks and nowhere else.
    """

    keys: Side
    values: Side
    page_table: Tensor  # [B, n]
    start: Tensor  # [B]: columns of left padding
    mask: Mask
    columns: int  # the length, known without asking the device
    padding: int  # the largest start, likewise
    paging: Paging
    first_page: int
    dense_from: int
    own_from: int  # from this column on rows are dense to every query (prefill="dense")
    value_dim: int  # output channels
    tiles: Tiles | None
    tally: Tally
    begins: int = 0  # columns before it have no rows, even where their page is there

    @property
    def page(self) -> int:
        return self.paging.page

    @property
    def length(self) -> Tensor:
        """Columns in all, [B]."""
        return torch.full_like(self.start, self.columns)

    def seam(self, query: int) -> int:
        """The column below which a query at column `query` sees sealed rows, else dense."""
        return min(self.paging.due(query + 1) * self.paging.page, self.own_from)

    def serves(self, query: int, mask: Mask) -> bool:
        """Has the view all rows that a query at this column sees by this rule?"""
        low = 0 if mask.window is None else max(0, query - mask.window + 1)
        apart = self.keys.sinks.shape[2]
        if low > apart < mask.sinks:  # the others lie among the rows
            low = min(low, int(self.start.min()) + apart)
        seam = max(low, self.seam(query))
        there = max(self.begins, min(seam, self.first_page * self.page))
        return seam >= self.dense_from and low >= there


@dataclass(frozen=True)
class Request:
    """What is asked of a backend; queries are already in the frame of the keys."""

    q: Tensor  # [B, H * group, T, D], of any float dtype: the last T columns of the view
    scale: float
    mask: Mask | Tensor
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [H * group]: learned logits that lead nowhere
    lse: bool = True  # is log-sum-exp asked for?
    dtype: torch.dtype = torch.float32  # that outputs may be rounded to


class Backend(Protocol):
    """One way to seal pages and to compute attention over a view."""

    @property
    def name(self) -> str: ...

    def supports(self, view: View, request: Request | None = None) -> str | None:
        """None, or the reason why this view (and this request) is not read here."""

    def seal(self, codec: Codec, rows: Tensor, side: str, tiles: Tiles | None) -> Fields | None:
        """What `codec.seal` gives for rows [B, n, H, P, D] of a side, packed as `tiles` says.

        None where this backend does not seal the codec.
        """

    def attend(self, request: Request, view: View) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, H * group, T, D] in the frame of the values; log-sum-exp, without D."""


@dataclass(frozen=True, eq=False)
class Stored:
    """The keys, or the values, of a layer: tensors by slot, in the frame of their codec."""

    codec: Codec
    open: Tensor  # [slots, H, P, D]
    sealed: Fields  # {field: [slots, H, P or 1, width]}
    tiles: Tiles | None
    memo: dict[Any, Any] = field(default_factory=dict)  # what backends worked out of it


@dataclass(frozen=True, eq=False)
class Pages:
    """What attention may read of one layer, until its next append: B sequences of B lengths.

    The columns of a query are counted back from the newest one: the last of T is at position
    `length - 1` of its sequence. Rows that came with the forward itself are read from `own`, where
    there are any: column t of it is position `length - T + t`, and padding where that is below
    zero. Other rows are read through the tables of the extent: positions below `sinks` from open
    pages and nowhere else, those below the seam of the query from sealed pages, the others from
    open ones. Values may lie inside the keys: then `values is keys`.
    """

    keys: Stored
    values: Stored
    own: Fields | None  # {side: [B, H, T, D]}
    extent: Extent
    dense: bool  # are rows of `own` dense to all queries, whatever falls due?
    mask: Mask
    value_dim: int  # output channels
    tally: Tally

    @property
    def batch(self) -> int:
        return len(self.extent.numbers)

    @property
    def came(self) -> int:
        """The columns of `own`."""
        return 0 if self.own is None else self.own["keys"].shape[2]


@dataclass(frozen=True)
class Snapshot:
    """All that a layer or a cache remembers, as tensors (canonical rows) and integers."""

    tensors: Fields
    numbers: Mapping[str, int]

    def copied(self) -> Snapshot:
        """The same in memory of its own."""
        return Snapshot({name: t.clone() for name, t in self.tensors.items()}, self.numbers)


class Ledger(Protocol):
    """Told by a state of each append, so that layers commit together."""

    @property
    def speculating(self) -> bool:
        """May a chunk be drafts? Then it is read as one token after the other would be."""

    def opening(self, state: LayerState) -> None: ...
    def closing(self, state: LayerState) -> None: ...


class LayerState(Protocol):
    """What one model layer remembers of the tokens so far.

    What `append` takes and `read` gives is each kind's own: rows, or the state of a recurrence.
    """

    ledger: Ledger

    def leaves(self) -> list[LayerState]:
        """The states that are appended to: this one, or its parts."""

    def followers(self) -> list[Follower]:
        """The states that a host changes in place, here or among the parts."""

    @property
    def length(self) -> int:
        """Tokens seen."""

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first rows."""

    @property
    def held(self) -> int:
        """Rows that `read` returns."""

    @property
    def max_held(self) -> int | None:
        """What `held` never passes; None where only memory is the limit."""

    @property
    def capacity(self) -> int | None:
        """The length that no append passes; None where only memory is the limit."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    @property
    def nbytes_used(self) -> int:
        """Bytes of rows that are there."""

    def nbytes_after(self, length: int, recipe: Any) -> int:
        """Bytes allocated once `length` tokens were seen, by a recipe of the same kind."""

    def nbytes_with(self, *args: Any, **kwargs: Any) -> int:
        """Bytes allocated once the same was appended, until a commit lets some go.

        What `append` would refuse is refused, and nothing changes. Where a forward died, what it
        left is still counted: roll back first.
        """

    @property
    def tally(self) -> Tally: ...
    def append(self, *args: Any, **kwargs: Any) -> Any: ...
    def read(self, *args: Any, **kwargs: Any) -> Any: ...
    def reachable(self, to: int) -> int:
        """The longest length <= `to` that `rewind` can serve."""

    def rewind(self, to: int) -> None: ...
    def checkpoint(self) -> None:
        """Make the present length one to come back to, where that takes a copy."""

    def commit(self) -> None:
        """Keep the last append: forget how to undo it, let go what it made superfluous."""

    def rollback(self) -> None:
        """Undo the append, the restore or the recode since the last commit, exactly."""

    def snapshot(self) -> Snapshot: ...
    def exposed(self) -> Snapshot:
        """A snapshot that may share memory: for who reads it before anything else happens."""

    def restore(self, snapshot: Snapshot) -> None:
        """Become what the snapshot holds, in memory of its own, or raise and stay."""

    def fork(self) -> LayerState: ...
    def select(self, index: Tensor) -> None: ...
    def move(self, device: torch.device) -> None:
        """Lie in the memory of another device, the same otherwise."""

    def widen(self, slack: int) -> None:
        """From now on, keep what an exact rewind of so many tokens needs."""

    def recode(self, recipe: Any) -> None:
        """Store the same tokens by another recipe of the same kind, or raise and stay."""

    def reset(self) -> None: ...
    def clear(self) -> None: ...


class Follower(LayerState, Protocol):
    """A state that a host changes in place, so that nobody appends to it."""

    def follow(self, length: int) -> None:
        """The others have come so far: the state is the one of that length."""

    def lose(self) -> None:
        """A forward died: the state is of no length any more, until it goes back or is reset."""
