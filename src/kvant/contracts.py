"""The nouns of kvant: read this first.

Three sentences carry the design.

1. The tokens of a sequence live in pages of P positions. The newest pages are open: dense, and
   written to. Older ones are sealed: encoded once and never changed again. Each lies in a slot.
2. A codec seals a page; a retention rule says which rows may go. Neither knows the other.
3. An extent says, in integers alone, how far each sequence is and in which slots its pages lie
   (extent.py). Attention reads through it, and derives every mask from positions.

A row is one head's key or value for one token. Rows come as [B, H, T, D]. A position is the index
of a token in its sequence; a column is its index in a batch whose sequences all end together, so
column and position differ by the padding, which is not stored.

One step: `cache[layer].append(k, v)` frames and stores the rows and returns a view; then
`attend(q, view)` picks a Backend and hands it a Request; once every layer has its rows, the cache
adopts the next extents. Query heads come in groups: `group` of them share one key head. The seam of
a query is the position from which on it reads dense rows, and below which sealed ones.

This module holds protocols and plain values; recipes.py says how a cache is described. It knows
no codec, no layer, no backend.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:  # specs are read, and commands are explained, without torch
    import torch
    from torch import Tensor

    from kvant.page_table import AppendPlan, Ints, PageTable

Fields: TypeAlias = "Mapping[str, Tensor]"
Order = Literal["BHTD", "BTHD"]


class Frame(Protocol):
    """The invertible map A, over the last dimension, that rows are stored under.

    `rows(k) . queries(q) == k . q`, and `outputs(rows(v)) == v`: kernels never see a frame.
    """

    @property
    def is_identity(self) -> bool:
        """A is 1: everything stays as it comes."""
        return False

    def transform_rows(self, x: Tensor) -> Tensor:
        """A x, for keys and values [..., H, T, D] on their way in."""

    def transform_queries(self, q: Tensor) -> Tensor:
        """A^-T q, for queries [..., H * group, T, D]; in float32 or wider, unless A is 1.

        It may enlarge a query beyond what its 16 bits hold, and rounding would cost bits.
        """

    def restore_outputs(self, x: Tensor) -> Tensor:
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

    def find_first_retained(self, length: int) -> int:
        """The first row, sinks aside, that must stay once `length` tokens were seen."""


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, as a rule over positions.

    >>> rows = torch.randn(1, 2, 10, 64)
    >>> view = kvant.Cache(1)[0].append(rows, rows)
    >>> kvant.attend(rows, view, mask=kvant.Mask(window=4)).shape
    torch.Size([1, 2, 10, 64])
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None  # a query sees its own block of `chunk` positions only

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("sinks", 0), ("chunk", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} of a mask: {least} or more is needed")


@dataclass(frozen=True)
class PageSelection:
    """How many of the sealed pages a query reads: the best by the bounds of their keys.

    The first page of a sequence is read in any case, and does not count.
    """

    pages: int = 0  # at least so many
    percent: float = 0.0  # and at least this share of those that there are

    def __post_init__(self) -> None:
        if not (self.pages >= 0 and 0 <= self.percent <= 100 and self.pages + self.percent > 0):
            raise ValueError(
                f"a selection of {self.pages} pages and {self.percent}%: one page or more, "
                "or a share up to 100% is needed"
            )

    def count_selected(self, num_pages: Ints) -> Ints:
        """Of so many pages, so many are read."""
        import numpy as np

        share = np.ceil(num_pages * self.percent / 100).astype(np.int64)
        count: Ints = np.minimum(num_pages, np.maximum(share, self.pages))
        return count


class ScoreInput(NamedTuple):
    """The rows that a prune chooses among, of N key heads: those of a sequence are neighbours.

    They end side by side at the newest token, and are in no frame, in float32.
    """

    keys: Tensor  # [N, n, D]
    values: Tensor  # [N, n, Dv]
    valid: Tensor  # [N, n]: booleans; a head may have fewer rows than others
    queries: Tensor | None  # [N, group, m, D]: the newest that a score asked for
    query_rows: Tensor | None  # [N, m]: the row of each of them; below zero: it is padding
    scale: float  # of the scores of queries and keys
    heads_per_sequence: int  # of a sequence


class Score(Protocol):
    """Says which rows of a key head matter most for the tokens to come; a frozen dataclass."""

    @property
    def name(self) -> str:
        """In specs and files."""

    @property
    def num_queries(self) -> int:
        """How many of the newest queries it asks for."""
        return 0

    @property
    def prunes_during_decode(self) -> bool:
        """May it prune while tokens are decoded, or only behind a prompt?"""
        return False

    def score_rows(self, rows: ScoreInput) -> Tensor:
        """[N, n]: the larger, the sooner a row is kept."""


@dataclass(frozen=True)
class Pruning:
    """How many rows each key head keeps behind a prompt, and by which score."""

    score: Score
    rows: int = 0  # so many,
    percent: float = 0.0  # or this share of the tokens that were seen
    adaptive: bool = False  # do the heads of a layer share what they may keep?

    def __post_init__(self) -> None:
        one = (self.rows > 0) != (self.percent > 0)
        if not (one and self.rows >= 0 and 0 <= self.percent <= 100):
            raise ValueError(
                f"a prune that keeps {self.rows} rows and {self.percent}%: one row or more, "
                "or a share up to 100% is needed"
            )

    def compute_budget(self, length: int) -> int:
        """Rows that stay of so many tokens."""
        return self.rows or math.ceil(length * self.percent / 100)


class Tiles(Protocol):
    """How the bytes of a sealed page lie in memory. Only an arena and a backend know of it."""

    def pack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor:
        """[..., rows, width] in canonical order -> the same shape and bytes, rearranged.

        The name says the side too, as in "keys.codes". With `into` they are put there.
        """

    def unpack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor: ...


@dataclass
class LayerStats:
    """What happened to one layer, for `stats()`."""

    appends: int = 0
    rewinds_exact: int = 0
    rewinds_decoded: int = 0
    attend_calls: Counter[str] = field(default_factory=Counter)  # backend -> calls
    sealed_pages: Counter[str] = field(default_factory=Counter)  # backend -> pages
    clamped_values: int | Tensor = (
        0  # values beyond the limit of their codec, where they were counted
    )
    warned: set[str] = field(default_factory=set)  # what was warned of; one set for a whole cache

    def add(self, other: LayerStats) -> None:
        self.appends += other.appends
        self.rewinds_exact += other.rewinds_exact
        self.rewinds_decoded += other.rewinds_decoded
        self.attend_calls.update(dict(other.attend_calls))  # a copy: other threads may be counting
        self.sealed_pages.update(dict(other.sealed_pages))
        self.clamped_values += int(other.clamped_values)


@dataclass(frozen=True, eq=False)
class PageSummary:
    """Two bounds of each channel of the keys of each sealed page, by slot.

    They follow from the pages, so they are worked out when first asked for, and never stored: the
    bounds are written, then `of`; who copies both goes the other way.
    """

    bounds: Tensor  # [slots, H, 2, D]: the upper ones, then the lower ones
    slot_versions: (
        Ints  # [slots]: how often a slot had been taken when they were worked out; 0: never
    )


class AttentionRequest(NamedTuple):
    """What is asked of a backend; queries are already in the frame of the keys."""

    q: Tensor  # [B, H * group, T, D], of any float dtype: the last T columns of the view
    scale: float
    mask: Mask | Tensor
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [H * group]: learned logits that lead nowhere
    return_lse: bool = True  # is log-sum-exp asked for?
    output_dtype: torch.dtype | None = None  # None: float32, see `out_dtype`
    # Of sealed pages, read these only: [B, H, T, n] numbers in order, then -1. None: read all.
    selected_pages: Tensor | None = None

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype that outputs may be rounded to."""
        if self.output_dtype is not None:
            return self.output_dtype
        import torch  # words are read without it

        return torch.float32


@dataclass(frozen=True, eq=False)
class PagedTensors:
    """The keys, or the values, of a layer: tensors by slot, in the frame of their codec."""

    codec: Codec
    open: Tensor  # [slots, H, P, D]
    sealed: Fields  # {field: [slots, H, P or 1, width]}
    tiles: Tiles | None
    summary: PageSummary | None = None  # of keys of which pages are selected
    derived: dict[Any, Any] = field(default_factory=dict)  # what backends worked out of it

    @cached_property
    def heads(self) -> int:
        return self.open.shape[1]

    @cached_property
    def dim(self) -> int:
        """Channels of a row."""
        return self.open.shape[3]


class ViewSelection(NamedTuple):
    """How a view selects pages, and what tells whether a summary is of what lies in a slot."""

    rule: PageSelection
    slot_versions: Ints  # [slots]: how often each was taken


class View(NamedTuple):
    """What attention may read of one layer, until its next append: B sequences of B lengths.

    It holds tensors and no slots: keep its cache as long as it is read. The pages of a cache that
    is gone are given to others, who write to them.

    The columns of a query are counted back from the newest one: the last of T is at position
    `length - 1` of its sequence. Rows that came with the forward itself are read from `own`, where
    there are any: column t of it is position `length - T + t`, and padding where that is below
    zero. Other rows are read through the tables of the extent: positions below `sinks` from open
    pages and nowhere else, those below the seam of the query from sealed pages, the others from
    open ones. Values may lie inside the keys: then `values is keys`.
    """

    keys: PagedTensors
    values: PagedTensors
    new_rows: Fields | None  # {side: [B, H, T, D]}
    page_table: PageTable
    new_rows_dense: bool  # are rows of `own` dense to all queries, whatever falls due?
    mask: Mask
    value_dim: int  # output channels
    stats: LayerStats
    backend: str | None = None  # the one that is to read it; None: the first that does
    selection: ViewSelection | None = None  # None: queries read all pages that they see
    query_listener: Callable[[Tensor, float], None] | None = (
        None  # who wants to see queries and their scale
    )

    @property
    def batch(self) -> int:
        return self.page_table.batch

    @property
    def heads(self) -> int:
        """Key heads of a sequence."""
        return self.keys.heads * self.page_table.tables_per_sequence

    @property
    def num_new(self) -> int:
        """The columns of `own`."""
        return 0 if self.new_rows is None else self.new_rows["keys"].shape[2]


class Backend(Protocol):
    """One way to store rows in pages, and to compute attention over a view."""

    @property
    def name(self) -> str: ...
    @property
    def fast_prefill(self) -> bool:
        """Does it read the rows of a prompt sooner than PyTorch does?"""

    def supports(self, view: View, request: AttentionRequest | None = None) -> str | None:
        """None, or the reason why this view (and this request) is not read here."""

    def select_pages(self, request: AttentionRequest, view: View) -> Tensor | None:
        """The sealed pages that queries read (`Request.chosen`) where a view selects."""

    def attend(self, request: AttentionRequest, view: View) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, H * group, T, D] in the frame of the values; log-sum-exp, without D."""

    def store(self, plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> bool:
        """Do what a change says of the rows {side: [B, H, T, D]} that came; False: not here."""


@dataclass(frozen=True)
class Snapshot:
    """All that a layer or a cache remembers, as tensors (canonical rows) and integers."""

    tensors: Fields
    numbers: Mapping[str, int]

    def copy(self) -> Snapshot:
        """The same in memory of its own."""
        return Snapshot({name: t.clone() for name, t in self.tensors.items()}, self.numbers)


class ExternalState(Protocol):
    """The state of a layer that a host changes in place, so that nobody appends to it."""

    @property
    def spec(self) -> Any: ...
    @property
    def stats(self) -> LayerStats: ...
    @property
    def length(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def nbytes_used(self) -> int: ...
    def nbytes_after(self, coming: int, recipe: Any) -> int: ...
    def advance_to(self, length: int) -> None:
        """The others have come so far: the state is the one of that length."""

    def invalidate(self) -> None:
        """A forward died: the state is of no length any more, until it goes back or is reset."""

    def reachable(self, to: int) -> int:
        """The longest length <= `to` that `going_back` can serve."""

    def prepare_rewind(self, to: int) -> Callable[[], None]:
        """What takes the state back to a length; from now on until then it is of none."""

    def checkpoint(self) -> None: ...
    def shared_snapshot(self) -> Snapshot: ...
    def parse_snapshot(self, snapshot: Snapshot) -> Any:
        """What `becoming` takes; an error where it does not fit."""

    def get_history(self) -> Any:
        """The state and its checkpoints between two forwards: one under way has died."""

    def prepare_restore(self, history: Any) -> Callable[[], None]:
        """What makes the state this one; from now on until then it is of no length."""

    def fork(self) -> ExternalState: ...
