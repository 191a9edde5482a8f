"""What the host is handed after an append, in place of keys and values.

A reading answers for attention where it can (`attend`), on the pages. Where it cannot, `rows` are
the dense rows, made once. It is current until the layer's next append.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvant.attention import attend, dense_rows
from kvant.attention.mask import visible
from kvant.contracts import Mask, View
from kvant.errors import CacheError, UnsupportedView
from kvant.hf.lazies import dense
from kvant.hf.masks import LazyMask
from kvant.hf.notes import Notes

KNOWN = "_kvant_padding"  # what is remembered of a mask, on it
SideName = Literal["keys", "values"]


@dataclass(frozen=True)
class Question:
    """What an attention call of the host asks, beside its queries."""

    mask: Tensor | None
    scale: float | None
    causal: bool = True
    softcap: float | None = None
    sink_logits: Tensor | None = None


class Source(Protocol):
    """Where the keys and values that a host sees come from."""

    def shape(self, side: SideName) -> tuple[int, ...]: ...
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
    refusal: str | None = None  # why dense rows would be wrong
    current: bool = True

    def shape(self, side: SideName) -> tuple[int, ...]:
        batch, heads, _, dim = self.view.keys.dense.shape
        return (batch, heads, self.shown, dim if side == "keys" else self.view.value_dim)

    def attend(self, q: Tensor, question: Question) -> Tensor | None:
        self.check_current()
        mask, packed = question.mask, q.shape
        if self.count == 1 and q.shape[2] > 1:  # the heads of a group, laid out as queries
            q = q.reshape(q.shape[0], -1, 1, q.shape[3])
            if mask is not None and mask.shape[1] > 1:
                mask = mask.reshape(mask.shape[0], -1, 1, mask.shape[3])
        seen = self.seen(mask, question.causal) if self.fits(q) else None
        if seen is None:
            return None
        view, rule = seen
        out = attend(
            q,
            view,
            mask=rule,
            scale=question.scale,
            softcap=question.softcap,
            sink_logits=question.sink_logits,
        )
        assert isinstance(out, Tensor)
        self.notes.fused += 1
        return out.reshape(*packed[:3], -1)

    def rows(self, side: SideName, why: str) -> Tensor:
        self.check_dense(why)
        part = self.view.keys if side == "keys" else self.view.values
        rows = dense_rows(self.view, part, self.view.columns - self.shown)
        if side == "values":
            rows = rows[..., : self.view.value_dim]
        return rows.to(self.dtype).contiguous()

    def check_dense(self, why: str) -> None:
        self.check_current()
        if self.refusal is not None:
            raise UnsupportedView(f"{why} needs dense rows: {self.refusal}")
        self.notes.materialized[why] += 1

    def fits(self, q: Tensor) -> bool:
        """Are these the queries of the tokens that were appended?"""
        batch, heads, _, dim = self.view.keys.dense.shape
        return q.shape[2] == self.count and q.shape[::3] == (batch, dim) and q.shape[1] % heads == 0

    def seen(self, mask: Tensor | None, causal: bool) -> tuple[View, Mask | Tensor] | None:
        """The view and the rule that the host's mask stands for."""
        view = self.view
        if isinstance(mask, LazyMask):
            rule, padding = mask.rule, mask.padding
            if rule is not None and padding is not None:
                return self.padded(padding), both(view.mask, rule)
            mask = dense(mask, "a pattern of the host's")
        if mask is None:
            plain = causal or self.count == 1
            rule = view.mask if plain else Mask(causal=False)
            return (view, rule) if plain or view.mask == Mask() else None
        padding = self.told(mask)
        if padding is not None:
            return self.padded(padding), view.mask
        self.notes.masks += 1
        return view, mask if self.refusal is None else self.narrowed(mask)

    def told(self, mask: Tensor) -> list[int] | None:
        """The padding, where a mask for one query says no more than that."""
        batch, heads, count, columns = mask.shape
        if (heads, count, mask.dtype) != (1, 1, torch.bool) or self.view.mask.chunk is not None:
            return None
        known: list[int] | None = getattr(mask, KNOWN, None)
        if known is None:
            hidden = columns - mask.sum((1, 2, 3))
            left = bool((mask[:, 0, 0].to(torch.int8).argmax(-1) == hidden).all())
            known = [int(n) for n in hidden] if left else []
            setattr(mask, KNOWN, known)  # the host hands the same mask to every layer
        if not known or (any(known) and self.view.keys.sinks.shape[2]):
            return None
        before = self.view.columns - columns
        return [n and n + before for n in known] * (self.view.start.shape[0] // batch)

    def padded(self, padding: list[int]) -> View:
        """The view, with the padding that only the mask tells of."""
        view = self.view
        most = max(padding, default=0)
        if most == 0 or view.padding > 0:
            return view
        if view.keys.sinks.shape[2]:
            raise CacheError(
                "sinks of a left-padded batch need the padding before the first rows: give "
                "kvant.cache_for(..., attention_mask=...), or kvant.attach the model"
            )
        return replace(view, start=torch.tensor(padding, device=view.start.device), padding=most)

    def narrowed(self, mask: Tensor) -> Tensor:
        """The host's mask, and beside it the window that the host knows nothing of."""
        view, columns = self.view, self.view.columns
        if mask.dtype != torch.bool:
            raise UnsupportedView(f"a mask of {mask.dtype} beside {self.refusal}")
        sinks = view.keys.sinks.shape[2]
        if view.padding == 0 and sinks and not bool(mask[:, :, -1, :sinks].all()):
            self.padded([1])  # says what is needed
        k = torch.arange(columns - mask.shape[-1], columns, device=mask.device)
        q = torch.arange(columns - self.count, columns, device=mask.device)
        start = view.start.view(-1, 1, 1, 1)
        rule = replace(view.mask, causal=False)
        return mask & visible(rule, q[:, None] - start, k - start)

    def check_current(self) -> None:
        if not self.current:
            raise CacheError(
                "keys or values of an earlier forward: the cache has moved on since, and they are "
                "not what they were; read them before the next forward"
            )


def both(own: Mask, host: Mask) -> Mask:
    """What both rules let through: they are of the same layer, so one of them is the narrower."""
    windows = [w for w in (own.window, host.window) if w is not None]
    return replace(own, window=min(windows, default=None), chunk=own.chunk or host.chunk)


class CrossReading(Reading):
    """Rows of an encoder: every query sees all of them, however many queries there are."""

    def attend(self, q: Tensor, question: Question) -> Tensor | None:
        """Each query as one more head of its group, at the newest column."""
        self.check_current()
        batch, heads, _, dim = self.view.keys.dense.shape
        if q.shape[::3] != (batch, dim) or q.shape[1] % heads or q.shape[2] == 0:
            return None
        groups, count = q.shape[1] // heads, q.shape[2]
        folded = q.reshape(batch, heads * groups * count, 1, dim)
        mask = dense(question.mask, "a mask over an encoder's rows")
        if mask is not None:
            self.notes.masks += 1
            mask = mask.expand(-1, heads * groups, count, -1).flatten(1, 2).unsqueeze(2)
        out = attend(folded, self.view, mask=mask, scale=question.scale, softcap=question.softcap)
        assert isinstance(out, Tensor)
        self.notes.fused += 1
        return out.reshape(batch, heads * groups, count, -1)
