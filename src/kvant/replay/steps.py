"""Decode steps: one layer's work on a token, on memory at fixed addresses, so it can be replayed.

The cache does not see the rows that steps write: the caller plans each token, and commits it after
(cache/token.py).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvant.contracts import AttentionRequest, Backend, Mask, View
from kvant.errors import UnsupportedView
from kvant.native import DTYPE_CODES
from kvant.page_table import AppendPlan


class StaticPageTable(Protocol):
    """The page table of a layer group for the next token, updated in place."""

    capacity: int  # columns that it has room for

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [B]."""

    @property
    def columns(self) -> Tensor:
        """Tokens of the longest sequence, its padding included."""

    def advance(self) -> None:
        """Advance every sequence by one token that needs no new page and seals none."""

    def update(self, plan: AppendPlan) -> bool:
        """Copy the plan's page table; return False for other sequences, or if it does not fit."""


@dataclass(eq=False)
class DecodeStep:
    """Decode step of one layer: append a token to every sequence, then attend to all rows.

    `page_table` counts the tokens, those of this step included. The caller advances it with every
    token, and updates it when pages change.
    """

    view: View  # the layer's storage; lengths and slots are read from `page_table`
    page_table: StaticPageTable
    mask: Mask
    backend: str

    @abstractmethod
    def rebind(self, view: View) -> bool:
        """Continue from a later view of the same layer; return False if it differs."""

    @abstractmethod
    def write_rows(self, keys: Tensor, values: Tensor) -> None:
        """Store the framed rows [B, H, 1, D] of the token."""

    @abstractmethod
    def attend(self, request: AttentionRequest) -> Tensor:
        """Return attention outputs in the frame of the values."""

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Return outputs [B, heads, 1, Dv], equal to those of `append` and then `attend`."""
        self._check_token(q, keys, values, sink_logits)
        key_frame, value_frame = self.view.keys.codec.frame, self.view.values.codec.frame
        self.write_rows(key_frame.transform_rows(keys), value_frame.transform_rows(values))
        request = AttentionRequest(
            key_frame.transform_queries(q),
            q.shape[-1] ** -0.5 if scale is None else scale,
            self.mask,
            softcap,
            sink_logits,
            return_lse=False,
            output_dtype=q.dtype if value_frame.is_identity else torch.float32,
        )
        return value_frame.restore_outputs(self.attend(request)).to(q.dtype)

    def _check_token(
        self, q: Tensor, keys: Tensor, values: Tensor, sink_logits: Tensor | None
    ) -> None:
        """Raise ValueError unless the rows and queries are one token that fits the pages."""
        batch = len(self.page_table.lengths)
        for name, rows, pages in (
            ("keys", keys, self.view.keys.open),
            ("values", values, self.view.values.open),
        ):
            needed = [batch, pages.shape[1], 1, pages.shape[3]]
            same = rows.dtype == pages.dtype and rows.device == pages.device
            if list(rows.shape) != needed or not same:
                raise ValueError(
                    f"{name} {list(rows.shape)} of {rows.dtype} on {rows.device}: a step takes one "
                    f"token, {needed} of {pages.dtype} on {pages.device}"
                )
        heads, dim = keys.shape[1::2]
        fits = q.ndim == 4 and (q.shape[0], *q.shape[2:]) == (batch, 1, dim)
        fits = fits and q.shape[1] > 0 and q.shape[1] % heads == 0
        if not fits or q.dtype not in DTYPE_CODES or q.device != keys.device:
            raise ValueError(
                f"queries {list(q.shape)} of {q.dtype} on {q.device}: a step takes one token, "
                f"[{batch}, a multiple of {heads}, 1, {dim}] of 16 or 32 bits on "
                f"{keys.device}"
            )
        if sink_logits is not None and sink_logits.shape != (q.shape[1],):
            raise ValueError(
                f"sink_logits of shape {list(sink_logits.shape)} for {q.shape[1]} heads: "
                "one per head is needed"
            )


def check_step_view(backend: Backend, view: View) -> None:
    """Raise UnsupportedView for a view that this backend has no decode steps for."""
    reason = backend.supports(view)
    if reason is None and view.selection is not None:
        reason = "each token selects pages"
    if reason is not None:
        raise UnsupportedView(f"no decode steps for this view: {reason}")
