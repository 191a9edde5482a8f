"""What the host is handed after an append, in place of keys and values.

A reading answers for attention where it can (`attend`), on the pages. Where it cannot, `rows` are
the dense rows, made once. It is current until the layer's next append.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kvant.attention import attend, reads_prompts
from kvant.cache.reading import columns
from kvant.contracts import Mask, View
from kvant.errors import CacheError, UnsupportedView
from kvant.hf.context import Notes
from kvant.hf.lazies import dense
from kvant.hf.masks import rule_of

NARROW = (
    "a window that the model does not have itself is seen by kvant's attention alone: "
    "kvant.attach the model, or leave the window out"
)
STORED = (
    "each token of this chunk sees rows of its own (prefill=stored, or a speculation): "
    "kvant.attach the model, or take a raw format"
)
PRUNED = (
    "rows of this layer were pruned, each head keeps others: kvant.attach the model, or leave the "
    "prune out"
)
RAGGED = (
    "the sequences of this cache have different lengths, and dense rows without a mask would show "
    "tokens that are not there: kvant.attach the model, or extract the sequences one by one"
)
SideName = Literal["keys", "values"]


class Question(NamedTuple):
    """What an attention call of the host asks, beside its queries."""

    mask: Tensor | None
    scale: float | None
    causal: bool = True
    softcap: float | None = None
    sink_logits: Tensor | None = None
    packable: bool = False  # the queries may be heads, laid out so by the host


class Source(Protocol):
    """Where the keys and values that a host sees come from."""

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the keys, and of the values."""

    def attend(self, q: Tensor, question: Question) -> Tensor | None:
        """Attention [B, heads, T, D], or None where dense rows are needed after all."""

    def rows(self, side: SideName, why: str) -> Tensor:
        """Dense rows, contiguous: models are known to call `view` on them."""


@dataclass(eq=False)
class Reading:
    """The rows of one layer for the forward that appended `count` tokens."""

    view: View
    count: int
    shown: int  # the newest columns, those the host has been told of
    dtype: torch.dtype
    notes: Notes
    narrow: bool = False  # the view's window is not the model's
    stored: bool = False  # each token of a chunk sees rows of its own
    packs: bool = True  # some layer of the host has grouped queries
    grouped: bool = False  # and so has the one that these rows are of: it was seen
    current: bool = True
    unpacked: bool = False
    masked: bool = True  # may masks be tensors, which not every kernel takes?

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        view = self.view
        lead = (view.batch, view.heads, self.shown)
        return (*lead, view.keys.dim), (*lead, view.value_dim)

    def attend(self, q: Tensor, question: Question) -> Tensor | None:
        if not self.current:
            self.check_current()
        mask, asked = question.mask, q.shape
        packed = self.packed(q, question)
        if packed:
            q, mask = as_heads(q, mask)
        if packed is None or not self.fits(q):
            return None
        seen = rule_of(self.view, q.shape[2], mask, question.causal, self.narrow)
        if seen is None:
            return None
        view, rule = seen
        if isinstance(rule, Tensor) and not self.masked:
            return None
        self.notes.masks += isinstance(rule, Tensor)
        out = self.over(q, view, None if rule is view.mask else rule, question)
        self.notes.fused += 1
        return out.reshape(*asked[:3], -1) if packed else out

    def over(self, q: Tensor, view: View, rule: Mask | Tensor | None, question: Question) -> Tensor:
        """Attention over all rows, those that were appended included."""
        out = attend(
            q,
            view,
            mask=rule,
            scale=question.scale,
            softcap=question.softcap,
            sink_logits=question.sink_logits,
        )
        assert isinstance(out, Tensor)
        return out

    def rows(self, side: SideName, why: str) -> Tensor:
        self.check_dense(why)
        rows = dense_rows(self.view, side, self.shown)
        if side == "values":
            rows = rows[..., : self.view.value_dim]
        return rows.to(self.dtype).contiguous()

    def packed(self, q: Tensor, question: Question) -> bool | None:
        """Are these the heads of the newest token, those of a group laid out as its queries?

        The host does so for one token (`pack_gqa`), which may be the last of several. Sizes cannot
        tell: as many tokens as a group has heads look the same. None: nothing can tell.
        """
        heads, mask = self.view.heads, question.mask
        self.grouped |= q.shape[1] > heads
        if not question.packable or q.shape[1] != heads or q.shape[2] == 1:
            return False
        if mask is not None and heads > 1 and mask.shape[1:3] == (1, q.shape[2]):
            return False  # a row for each query is one for each token: all heads share it
        if self.count == 1 or self.grouped:
            return True
        return None if self.packs else False

    def fits(self, q: Tensor) -> bool:
        """Are these the queries of the tokens that were appended, or of the last of them?"""
        view = self.view
        batch, asked, tokens, width = q.shape
        fits = batch == view.batch and width == view.keys.dim and asked % view.heads == 0
        return fits and tokens in (1, self.count)  # a model may need the last one's logits only

    def check_current(self) -> None:
        if not self.current:
            raise CacheError(
                "keys or values of an earlier forward: the cache has moved on since, and they are "
                "not what they were; read them before the next forward"
            )

    def check_dense(self, why: str) -> None:
        """Refuse dense rows that would not be what attention sees; count the others once."""
        self.check_current()
        refusal = NARROW if self.narrow else STORED if self.stored else None
        refusal = RAGGED if self.view.extent.ragged else refusal
        refusal = PRUNED if self.view.extent.pruned.any() else refusal
        if refusal is not None:
            raise UnsupportedView(f"{why} needs dense rows, but {refusal}")
        if not self.unpacked:
            self.notes.materialized[why] += 1
            self.unpacked = True


def dense_rows(view: View, side: SideName, shown: int) -> Tensor:
    """The newest columns as the newest query sees them, out of their frame."""
    stored, length = view.keys if side == "keys" else view.values, view.extent.columns
    return stored.codec.frame.outputs(columns(view, side, length - shown, length))


def as_heads(q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Each query as one more head, at the newest column."""
    if mask is not None and mask.shape[1] * mask.shape[2] > 1:
        mask = mask.expand(-1, *q.shape[1:3], -1).flatten(1, 2).unsqueeze(2)
    batch, heads, count, dim = q.shape
    return q.reshape(batch, heads * count, 1, dim), mask


@dataclass(eq=False)
class PromptReading(Reading):
    """The rows of a first chunk, as they came: where no kernel reads them, the host does."""

    keys: Tensor = field(kw_only=True)
    values: Tensor = field(kw_only=True)
    masked: bool = False

    def attend(self, q: Tensor, question: Question) -> Tensor | None:
        """None where gradients are wanted, too, and where no kernel is sooner done."""
        if (torch.is_grad_enabled() and q.requires_grad) or not reads_prompts(self.view, q):
            return None
        return super().attend(q, question)

    def rows(self, side: SideName, why: str) -> Tensor:
        self.check_current()
        return (self.keys if side == "keys" else self.values).contiguous()


class CrossReading(Reading):
    """Rows of an encoder: every query sees all of them, however many queries there are."""

    def attend(self, q: Tensor, question: Question) -> Tensor | None:
        """Each query as one more head of its group, at the newest column."""
        self.check_current()
        heads, dim = self.view.keys.heads, self.view.keys.dim
        if q.shape[::3] != (self.view.batch, dim) or q.shape[1] % heads or q.shape[2] == 0:
            return None
        folded, mask = as_heads(q, dense(question.mask, "a mask over an encoder's rows"))
        self.notes.masks += mask is not None
        out = attend(folded, self.view, mask=mask, scale=question.scale, softcap=question.softcap)
        assert isinstance(out, Tensor)
        self.notes.fused += 1
        return out.reshape(*q.shape[:3], -1)
