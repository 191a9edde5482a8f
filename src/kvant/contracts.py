"""The protocols and plain values that all of kvant shares: read this first.

Three sentences carry the design.

1. The tokens of a sequence live in pages of P positions. The newest pages are open: dense, and
   written to. Older pages are sealed: encoded once and never changed. Each page lies in a slot.
2. A codec seals a page; a retention rule decides which rows are retained. Neither knows the other.
3. A page table holds, in integers alone, the length of each sequence and the slots of its pages
   (page_table.py). Attention reads through it, and derives every mask from positions.

A row is the key or value of one head for one token. Rows have the shape [B, H, T, D]. A position
is the index of a token in its sequence. A column is its index in a batch whose sequences all end
together. They differ by the left padding, which is not stored.

One step: `cache[layer].append(k, v)` transforms and stores the rows and returns a view. Then
`attend(q, view)` selects a Backend and passes it an AttentionRequest. Once every layer has its
rows, the cache commits the next page tables. Query heads form groups: the `group` heads of one
share a key head. Each query has a position `dense_from`: it reads rows before it sealed, rows from
it on dense.

This module knows no codec, no layer and no backend. recipes.py describes a cache.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from kvant.lazy import Derived

if TYPE_CHECKING:  # parsing a spec and --help work without importing torch
    import torch
    from torch import Tensor

    from kvant.page_table import AppendPlan, Ints, PageTable

Fields: TypeAlias = "Mapping[str, Tensor]"
Order = Literal["BHTD", "BTHD"]


class Frame(Protocol):
    """The invertible linear map A, over the last dimension, applied to rows before storage.

    The score of `transform_rows(k)` and `transform_queries(q)` is that of `k` and `q`, and
    `restore_outputs(transform_rows(v)) == v`. So kernels never apply a frame.
    """

    @property
    def is_identity(self) -> bool:
        """Whether A is 1, so that rows, queries and outputs are unchanged."""
        return False

    def transform_rows(self, x: Tensor) -> Tensor:
        """Return A x of keys or values [..., H, T, D], before they are stored."""

    def transform_queries(self, q: Tensor) -> Tensor:
        """Return A^-T q of queries [..., H * group, T, D], in float32 or wider unless A is 1.

        The result may exceed the range of 16-bit floats, and rounding it would cost precision.
        """

    def restore_outputs(self, x: Tensor) -> Tensor:
        """Return A^-1 x of attention outputs and of rows that are read back."""


@dataclass(frozen=True)
class Field:
    """One named tensor of a sealed page: `width` values per row, or per page."""

    dtype: torch.dtype | None  # None: the dtype of the rows
    width: int
    per_page: bool = False

    def height(self, page: int) -> int:
        return 1 if self.per_page else page


@dataclass(frozen=True)
class Form:
    """The encoding of a sealed row, as kernels know it: they read and write exactly these bytes."""

    kind: Literal["raw", "affine", "codebook", "float"]
    bits: int = 0
    group: int = 0  # values per scale; 0: the whole row
    corrected: bool = False  # the scale is refitted to the chosen codes


class Codec(Protocol):
    """A frozen dataclass that encodes pages of dense rows into named fields, and decodes them.

    Rows arrive framed. `seal` is deterministic and handles each page on its own: leading dimensions
    are independent, so pages may be sealed in any order and together. A NaN or an infinity should
    change no row but its own.
    """

    @property
    @abstractmethod
    def frame(self) -> Frame:
        """The map applied to rows before `seal`; `Identity()`: they stay as the model has them."""

    @property
    def exact(self) -> bool:
        """Whether decoded rows equal the originals; then pages need not be sealed."""
        return False

    @property
    def limit(self) -> float:
        """The largest magnitude it stores; larger finite values are clamped to it."""
        return math.inf

    @property
    def tail(self) -> int:
        """Default number of newest rows that are read dense."""
        return 0

    @property
    def form(self) -> Form | None:
        """The encoding as kernels read it; None: no kernel reads it, the reference backend does."""
        return None

    @abstractmethod
    def fields(self, dim: int) -> Mapping[str, Field]:
        """Return the tensors of a page of rows of `dim` values, or refuse `dim`."""

    @abstractmethod
    def seal(self, rows: Tensor) -> Fields:
        """Encode rows [..., P, dim] as {name: [..., P or 1, width]}."""

    @abstractmethod
    def open(self, fields: Fields) -> Tensor:
        """Decode a page to rows [..., P, dim] in float32; raw rows stay as stored."""


@dataclass(frozen=True)
class Mask:
    """The keys that a query may attend to, as a rule on positions.

    >>> rows = torch.randn(1, 2, 10, 64)
    >>> view = kvant.Cache(1)[0].append(rows, rows)
    >>> kvant.attend(rows, view, mask=kvant.Mask(window=4)).shape
    torch.Size([1, 2, 10, 64])
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None  # a query sees only its own block of `chunk` positions

    def __post_init__(self) -> None:
        for name, minimum in (("window", 1), ("sinks", 0), ("chunk", 1)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name}={value} of a mask: {minimum} or more is needed")


@dataclass(frozen=True)
class PageSelection:
    """The number of sealed pages that a query reads: those whose key bounds score best.

    The first page of a sequence is always read, and not counted.
    """

    pages: int = 0  # minimum
    percent: float = 0.0  # minimum, as a share of the sealed pages

    def __post_init__(self) -> None:
        if not (self.pages >= 0 and 0 <= self.percent <= 100 and self.pages + self.percent > 0):
            raise ValueError(
                f"a selection of {self.pages} pages and {self.percent}%: one page or more, "
                "or a share up to 100% is needed"
            )

    def count_selected(self, num_pages: Ints) -> Ints:
        """Return how many of `num_pages` pages are read."""
        import numpy as np

        share = np.ceil(num_pages * self.percent / 100).astype(np.int64)
        count: Ints = np.minimum(num_pages, np.maximum(share, self.pages))
        return count


class Tiles(Protocol):
    """The byte order inside a sealed page in memory, known only to a storage and a backend."""

    def pack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor:
        """Rearrange [..., rows, width] from canonical order; shape and bytes stay the same.

        `name` includes the side, as in "keys.codes". The result is written to `into`, if given.
        """

    def unpack(self, name: str, field: Tensor, into: Tensor | None = None) -> Tensor: ...


@dataclass
class LayerStats:
    """Event counters of one layer, for `stats()`."""

    appends: int = 0
    rewinds_exact: int = 0
    rewinds_decoded: int = 0
    attend_calls: Counter[str] = field(default_factory=Counter)  # backend -> calls
    sealed_pages: Counter[str] = field(default_factory=Counter)  # backend -> pages
    clamped_values: int | Tensor = 0  # values that exceeded the limit of their codec
    warned: set[str] = field(default_factory=set)  # issued warnings; layers of a cache share it

    def add(self, other: LayerStats) -> None:
        self.appends += other.appends
        self.rewinds_exact += other.rewinds_exact
        self.rewinds_decoded += other.rewinds_decoded
        self.attend_calls.update(dict(other.attend_calls))  # a copy: other threads may update it
        self.sealed_pages.update(dict(other.sealed_pages))
        self.clamped_values += int(other.clamped_values)


@dataclass(frozen=True, eq=False)
class PageSummary:
    """Per-channel bounds of the keys of each sealed page, by slot.

    Bounds follow from pages, so they are computed on first use and never stored in files. A writer
    writes `bounds`, then `slot_versions`; a reader copies them in the opposite order.
    """

    bounds: Tensor  # [slots, H, 2, D]: upper bounds, then lower ones
    slot_versions: Ints  # [slots]: the version of the slot that the bounds are of; 0: none


class AttentionRequest(NamedTuple):
    """One attention call for a backend; queries are already in the frame of the keys."""

    q: Tensor  # [B, H * group, T, D], of any float dtype: the last T columns of the view
    scale: float
    mask: Mask | Tensor
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [H * group]: learned logits without a value row
    return_lse: bool = True
    output_dtype: torch.dtype | None = None  # None: float32, see `out_dtype`
    # The sealed pages to read: [B, H, T, n] ascending numbers, then -1. None: all.
    selected_pages: Tensor | None = None

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype that outputs may be rounded to."""
        if self.output_dtype is not None:
            return self.output_dtype
        import torch  # parsing a spec does not need it

        return torch.float32


@dataclass(frozen=True, eq=False)
class PagedTensors:
    """The keys, or the values, of a layer: tensors by slot, in the frame of their codec."""

    codec: Codec
    open: Tensor  # [slots, H, P, D]
    sealed: Fields  # {field: [slots, H, P or 1, width]}
    tiles: Tiles | None
    summary: PageSummary | None = None  # of keys, if queries select pages
    derived: Derived = field(default_factory=Derived)  # values that backends cache

    @cached_property
    def heads(self) -> int:
        return self.open.shape[1]

    @cached_property
    def dim(self) -> int:
        """Channels of a row."""
        return self.open.shape[3]


class ViewSelection(NamedTuple):
    """The page selection of a view, with the slot versions that validate a summary."""

    rule: PageSelection
    slot_versions: Ints  # [slots]: how often each was allocated


class View(NamedTuple):
    """The readable state of one layer of B sequences, valid until its next append.

    A view refers to tensors without holding slots: keep its cache alive while reading it. The pages
    of a deleted cache are reused by other caches.

    Query columns count back from the newest: the last of T is at position `length - 1` of its
    sequence. The rows of the forward itself may be in `new_rows`. Then column t is position
    `length - T + t`, or padding if that is below zero. All other rows are read through the page
    table:

        position   0      sinks        dense_from of the query        length - T       length
                   | open   | sealed pages     | open pages                | new_rows      |

    Values may lie inside the keys: then `values is keys`.
    """

    keys: PagedTensors
    values: PagedTensors
    new_rows: Fields | None  # {side: [B, H, T, D]}
    page_table: PageTable
    new_rows_dense: bool  # all queries read `new_rows` dense, even rows of due pages
    mask: Mask
    batch: int  # sequences
    heads: int  # key heads of a sequence
    value_dim: int  # output channels
    stats: LayerStats
    backend: str | None = None  # a required backend; None: the first that supports the view
    selection: ViewSelection | None = None  # None: queries read all visible pages
    query_listener: Callable[[AttentionRequest], None] | None = None  # its queries have no frame

    def __repr__(self) -> str:
        codecs = dict.fromkeys(type(side.codec).__name__ for side in (self.keys, self.values))
        return (
            f"View({self.batch} x {self.page_table.num_columns} tokens, {self.heads} key heads of "
            f"{self.keys.dim}, {' and '.join(codecs)})"
        )

    @property
    def num_new(self) -> int:
        """The columns of `new_rows`."""
        return 0 if self.new_rows is None else self.new_rows["keys"].shape[2]


class Backend(Protocol):
    """One way to store rows in pages and to compute attention over a view."""

    @property
    def name(self) -> str: ...
    @property
    def fast_prefill(self) -> bool:
        """Whether it computes attention over the rows of a prompt faster than PyTorch."""

    def supports(self, view: View, request: AttentionRequest | None = None) -> str | None:
        """Return None, or the reason why this backend cannot serve the view or the request."""

    def select_pages(self, request: AttentionRequest, view: View) -> Tensor | None:
        """Return the sealed pages that queries read (`AttentionRequest.selected_pages`)."""

    def attend(self, request: AttentionRequest, view: View) -> tuple[Tensor, Tensor | None]:
        """Return outputs [B, H * group, T, D] in the frame of the values, and log-sum-exp."""

    def store(self, plan: AppendPlan, rows: Fields, sides: Mapping[str, PagedTensors]) -> bool:
        """Apply `plan` to `rows`, {side: [B, H, T, D]}; return False if it cannot store them."""


@dataclass(frozen=True)
class Snapshot:
    """The complete state of a layer or a cache: tensors (canonical rows) and integers."""

    tensors: Fields
    numbers: Mapping[str, int]

    def copy(self) -> Snapshot:
        """Return a copy with memory of its own."""
        return Snapshot({name: t.clone() for name, t in self.tensors.items()}, self.numbers)


class ExternalState(Protocol):
    """The state of a layer that the model library updates in place, without `append`."""

    spec: Any
    stats: LayerStats

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
        """Record that the forward has stored `length` tokens in the other layers."""

    def invalidate(self) -> None:
        """Mark the state as undefined after an incomplete forward, until a rewind or reset."""

    def reachable(self, to: int) -> int:
        """Return the longest length <= `to` that `prepare_rewind` can serve."""

    def prepare_rewind(self, to: int) -> Callable[[], None]:
        """Return a function that rewinds the state to `to`; it is undefined until then."""

    def checkpoint(self) -> None: ...
    def shared_snapshot(self) -> Snapshot: ...
    def parse_snapshot(self, snapshot: Snapshot) -> Any:
        """Return the argument of `prepare_restore`, or raise if `snapshot` does not fit."""

    def get_history(self) -> Any:
        """Return the state and its checkpoints; call it between forwards only."""

    def prepare_restore(self, history: Any) -> Callable[[], None]:
        """Return a function that sets the state to `history`; it is undefined until then."""

    def fork(self) -> ExternalState: ...
