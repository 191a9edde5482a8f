"""Turn the masks of transformers into rules over positions, where that is possible.

Before any layer computes keys, a model asks for its mask, described by a function of query and key
indices. If the function is known and the mask hides only left padding, attention needs just a rule
and the padding, which do not grow with the context. transformers evaluates any other mask.

Masks count columns. All sequences of a batch end in the same column; the columns before the first
token of a sequence are padding:

    column      0 1 2 3 4 5 6 7
    sequence 0  . . . a b c d e      padding 3, positions 0..4 in columns 3..7
    sequence 1  f g h i j k l m      padding 0

Padding known before the first rows is not stored (`PageTable.has_padding`). Padding that only a
mask reveals is stored like other rows, and hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvant.attention.mask import evaluate_mask
from kvant.contracts import Mask, View
from kvant.errors import CacheError, UnsupportedView


class LazyTensor(torch.Tensor):
    """A tensor whose values are computed by the first operation that its class does not handle."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    _dense: Tensor | None
    _shape: torch.Size

    # Every layer reads the shape: `attrgetter` avoids the PyTorch dispatcher and a Python call.
    shape = property(attrgetter("_shape"))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func)
        dense_args, dense_kwargs = tree_map_only(
            LazyTensor, lambda lazy: lazy.materialize(name), (tuple(args), dict(kwargs or {}))
        )
        return func(*dense_args, **dense_kwargs)

    @property
    def is_materialized(self) -> bool:
        """Whether the dense tensor exists; if so, use only it: callers may have changed it."""
        return self._dense is not None

    def materialize(self, reason: str) -> Tensor:
        """Return the dense tensor; `reason` names the operation that needs it."""
        if self._dense is None:
            self._dense = self.compute_dense(reason)
        return self._dense

    def compute_dense(self, reason: str) -> Tensor:
        """Compute the dense tensor."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.device})"


def materialize_tensor(tensor: Tensor | None, reason: str) -> Tensor | None:
    """Return a plain tensor, materialized if it is lazy."""
    return tensor.materialize(reason) if isinstance(tensor, LazyTensor) else tensor


def find_left_padding(mask: Tensor) -> list[int] | None:
    """Return the padding before each sequence of a mask [B, columns]; None if it has holes."""
    starts = mask.to(torch.int8).argmax(-1)
    has_no_holes = torch.equal(mask.sum(-1), mask.shape[-1] - starts)
    return [int(start) for start in starts] if has_no_holes else None


MaskFunction = Callable[..., Tensor | None]  # makes masks for one attention of transformers
LOCAL_MASK_RULES: Mapping[str, Callable[[int], Mask]] = {  # overlays of transformers -> rules
    "sliding_window_overlay.<locals>.inner_mask": lambda size: Mask(window=size),
    "chunked_overlay.<locals>.inner_mask": lambda size: Mask(chunk=size),
}


class LazyMask(LazyTensor):
    """A mask that a model requested: a rule and padding if they are known, else a tensor."""

    mask_function: MaskFunction
    arguments: Mapping[str, Any]

    @classmethod
    def from_arguments(cls, mask_function: MaskFunction, arguments: Mapping[str, Any]) -> LazyMask:
        """Make a mask that calls `mask_function(**arguments)` when it is materialized."""
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        # Some models read the dtype of the mask and build tensors of the same dtype.
        dtype = torch.bool if mask_function is sdpa_mask else arguments.get("dtype", torch.float32)
        mask: LazyMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device(arguments.get("device", "cpu"))
        )
        mask._dense, mask._shape = None, torch.Size(shape)
        mask.mask_function, mask.arguments = mask_function, arguments
        return mask

    def compute_dense(self, reason: str) -> Tensor:
        mask = self.mask_function(**{**self.arguments, "allow_is_causal_skip": False})
        assert mask is not None  # None only if a skip is allowed
        return mask

    @cached_property
    def original_mask(self) -> Tensor | None:
        """The mask that transformers would have made; None if it skips the mask."""
        return self.mask_function(**self.arguments)

    @cached_property
    def rule(self) -> Mask | None:
        """The rule of the mask; None if it depends on more than positions."""
        function, local_size = self.arguments["mask_function"], self.arguments.get("local_size")
        if function is causal_mask_function:
            return Mask()
        # The closure of and_masks(overlay, causal_mask_function) holds both, in one tuple.
        cells = getattr(function, "__closure__", None)
        parts: Any = cells[0].cell_contents if cells else None
        if not isinstance(parts, tuple) or parts[1:] != (causal_mask_function,):
            return None
        make_rule = LOCAL_MASK_RULES.get(parts[0].__qualname__)
        return None if make_rule is None or local_size is None else make_rule(local_size)

    @cached_property
    def padding(self) -> list[int] | None:
        """The left padding of each sequence; None if the mask hides anything else."""
        mask: Tensor | None = self.arguments.get("attention_mask")
        columns = self.arguments["q_offset"] + self.arguments["q_length"]
        if mask is None:
            return [0] * self.arguments["batch_size"]
        return find_left_padding(mask) if mask.ndim == 2 and mask.shape[1] == columns else None


def make_lazy_mask_function(mask_function: MaskFunction) -> MaskFunction:
    """Wrap a mask function of transformers to return a LazyMask where a rule may suffice."""

    def make_mask(**arguments: Any) -> Tensor | None:
        # Encoders, packed sequences and blocks of an image get the mask of transformers.
        if arguments.get("allow_is_bidirectional_skip"):
            return mask_function(**arguments)
        check_mask_width(arguments)
        if not arguments.get("allow_is_causal_skip", True):
            return mask_function(**arguments)
        return LazyMask.from_arguments(mask_function, arguments)

    return make_mask


def check_mask_width(arguments: Mapping[str, Any]) -> None:
    """Refuse an attention mask wider than the tokens: its padding would be in wrong columns."""
    mask: Tensor | None = arguments.get("attention_mask")
    columns = arguments["q_offset"] + arguments["q_length"]
    if mask is not None and mask.ndim == 2 and mask.shape[1] > columns:
        raise CacheError(
            f"an attention_mask of {mask.shape[1]} columns for {columns} tokens: this model makes "
            "it wider than its text, so the columns of padding are unknown; kvant.detach the "
            "model, or give its generate a cache from kvant.cache_for"
        )


# Results cached on a mask, since every layer receives the same mask tensor:
PADDING_ATTRIBUTE = "_kvant_padding"  # (version, padding) of a mask for one query
CHUNK_PADDING_ATTRIBUTE = "_kvant_chunk_padding"  # (key, padding) of a mask for several queries


def resolve_mask(
    view: View, num_queries: int, mask: Tensor | None, causal: bool, is_window_narrowed: bool
) -> tuple[View, Mask | Tensor] | None:
    """Return the view and the mask for `num_queries` queries; None if dense rows are needed.

    `is_window_narrowed`: the window of the view is narrower than that of the model.
    """
    if num_queries > 1 and view.mask.chunk is not None and view.page_table.ragged:
        raise UnsupportedView(
            "attention chunks of sequences of different lengths begin in different columns, which "
            "the mask of transformers cannot express: read one token at a time"
        )
    if isinstance(mask, LazyMask):
        rule, padding = mask.rule, mask.padding
        if rule is not None and padding is not None and _agrees_with_padding(view, padding):
            if not is_window_narrowed and rule.window is None and rule.chunk is None:
                check_model_window(view, num_queries)
            return hide_padding(view, padding), intersect_rules(view.mask, rule)
        mask = materialize_tensor(mask, "a mask that is no rule")
    if mask is None:  # no row is hidden
        if causal and not is_window_narrowed:
            check_model_window(view, num_queries)
        if view.page_table.has_padding:
            check_padding_hidden(view, num_queries)
        if causal or num_queries == 1:
            return view, view.mask
        return (view, Mask(causal=False)) if view.mask == Mask() else None
    padding = (
        _find_padding_for_query(view, mask)
        if num_queries == 1
        else _find_padding_for_queries(view, num_queries, mask, is_window_narrowed)
    )
    if padding is not None and _agrees_with_padding(view, padding):
        return hide_padding(view, padding), view.mask
    if view.page_table.ragged and num_queries == 1:
        check_mask_hides_nothing(mask)
        return view, view.mask
    if mask.shape[2] == 1:
        mask = mask.expand(-1, -1, num_queries, -1)  # one row for all queries
    check_mask_hides_padding(view, mask)
    return view, restrict_mask_to_window(view, num_queries, mask) if is_window_narrowed else mask


def _find_padding_for_query(view: View, mask: Tensor) -> list[int] | None:
    """Return the padding of a mask for one query, None if it hides anything else."""
    _, heads, num_queries, columns = mask.shape
    is_chunked = view.mask.chunk is not None
    if (heads, num_queries, mask.dtype) != (1, 1, torch.bool) or is_chunked:
        return None
    version = None if mask.is_inference() else mask._version
    cached_version, padding = getattr(mask, PADDING_ATTRIBUTE, (None, []))
    if cached_version is None or cached_version != version:
        padding = find_left_padding(mask[:, 0, 0]) or []
        setattr(mask, PADDING_ATTRIBUTE, (version, padding))
    if not padding or (
        any(padding) and view.page_table.layer_group.sinks and not view.page_table.has_padding
    ):
        return None
    first_column = view.page_table.num_columns - columns
    # The mask has only the newest columns; a sequence without padding stays at 0.
    return [n and n + first_column for n in padding] * (view.batch // len(padding))


def _find_padding_for_queries(
    view: View, num_queries: int, mask: Tensor, is_window_narrowed: bool
) -> list[int] | None:
    """Return the padding of a mask for several queries, if the view's rule explains the rest."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, num_queries):
        return None
    # If the window of the view is narrower than that of the model, the mask lacks it.
    rule = replace(view.mask, window=None, sinks=0) if is_window_narrowed else view.mask
    version = None if mask.is_inference() else mask._version
    key = (version, rule, view.page_table.num_columns, view.batch, tuple(_compute_padding(view)))
    cached: tuple[object, list[int] | None] = getattr(mask, CHUNK_PADDING_ATTRIBUTE, (None, None))
    if cached[0] != key:
        cached = (key, _match_padding(view, num_queries, mask, rule))
        setattr(mask, CHUNK_PADDING_ATTRIBUTE, cached)
    return cached[1]


def _match_padding(view: View, num_queries: int, mask: Tensor, rule: Mask) -> list[int] | None:
    """Return a padding that makes `rule` equal to `mask`, None if there is none."""
    batch, columns = view.batch, view.page_table.num_columns
    first_column = columns - mask.shape[-1]
    candidates = [_compute_padding(view)]
    if (
        not view.page_table.has_padding
        and first_column == 0
        and not view.page_table.layer_group.sinks
    ):
        padding = find_left_padding(mask[:, 0, -1])
        candidates += [padding * (batch // len(padding))] if padding else []
    k = torch.arange(columns, device=mask.device)
    for candidate in candidates:
        start = torch.tensor(candidate, device=mask.device).view(-1, 1, 1, 1)
        visible = evaluate_mask(rule, k[-num_queries:, None] - start, k - start)
        older, masked = visible[..., :first_column], visible[..., first_column:]
        if not bool(older.any()) and bool((masked == mask).all()):
            return candidate
    return None


def _compute_padding(view: View) -> list[int]:
    """Return the column of the first position of each sequence."""
    table = view.page_table
    starts: list[int] = table.reduce_to_sequences(table.num_columns - table.lengths).tolist()
    return starts


def _agrees_with_padding(view: View, padding: list[int]) -> bool:
    """Return whether the padding of a mask agrees with that of the view."""
    if view.page_table.ragged and not any(padding):
        return True
    if view.page_table.has_padding:
        return _compute_padding(view) == padding
    # Attention chunks are counted from the first token: stored padding would shift them.
    return view.mask.chunk is None or not any(padding)


def hide_padding(view: View, padding: list[int]) -> View:
    """Return the view with stored padding hidden."""
    if not any(padding) or view.page_table.has_padding:
        return view
    if view.page_table.layer_group.sinks or view.page_table.pruned_at.any():
        raise make_missing_padding_error()
    return view._replace(page_table=view.page_table.mask_leading_rows(padding))


def check_padding_hidden(view: View, num_queries: int) -> None:
    """Refuse an unmasked call if its queries would see padding, whose rows are not stored."""
    window, columns = view.mask.window, view.page_table.num_columns
    low = 0 if window is None else max(0, columns - num_queries - window + 1)
    if low < max(_compute_padding(view)):
        raise make_padding_mismatch_error(view)


def check_model_window(view: View, num_queries: int) -> None:
    """Refuse chunks longer than the layer's window, if the model's mask does not apply it."""
    window = view.mask.window
    if window is not None and num_queries > window:
        raise UnsupportedView(
            f"{num_queries} tokens at once on a layer with a window of {window}, which the model "
            f"does not mask: give prompts in chunks of at most {window} tokens (prefill_chunk), or "
            "leave kvant out"
        )


def check_mask_hides_nothing(mask: Tensor) -> None:
    """Refuse a mask over columns for sequences of different lengths, unless it hides nothing."""
    if not bool(mask.all() if mask.dtype == torch.bool else (mask == 0).all()):
        raise UnsupportedView(
            "a mask or a bias that the model made for one length, on sequences of different "
            "lengths: extract each sequence"
        )


def check_mask_hides_padding(view: View, mask: Tensor) -> None:
    """Refuse a mask that makes known padding visible, since it is not stored."""
    if not view.page_table.has_padding:
        return
    newest = mask[:, :, -1:]
    visible = newest if mask.dtype == torch.bool else newest > torch.finfo(mask.dtype).min / 2
    columns = view.page_table.num_columns
    column = torch.arange(columns - mask.shape[-1], columns, device=mask.device)
    start = torch.tensor(_compute_padding(view), device=mask.device).view(-1, 1, 1, 1)
    if bool((visible & (column < start)).any()):
        raise make_padding_mismatch_error(view)


def make_padding_mismatch_error(view: View) -> CacheError:
    """Make the error for a mask whose padding is not that of the cache."""
    return CacheError(
        f"the cached sequences begin at columns {_compute_padding(view)}, but this call implies "
        "other beginnings, by its mask or by having none; padding is not stored: reset the cache, "
        "or give the right mask to kvant.cache_for(..., attention_mask=...) and read all tokens "
        "again"
    )


def make_missing_padding_error() -> CacheError:
    """Make the error for padding that must be known before the first rows."""
    return CacheError(
        "sinks and pruned rows of a left-padded batch need the padding before the first rows are "
        "stored: give kvant.cache_for(..., attention_mask=...), kvant.attach the "
        "model, or use a window without sinks, by window=N,sinks=0"
    )


def restrict_mask_to_window(view: View, num_queries: int, mask: Tensor) -> Tensor:
    """Intersect a mask with the window of the view, which the model does not have."""
    if mask.dtype != torch.bool:
        raise UnsupportedView(
            f"a mask of {mask.dtype} with a window that the model does not have: "
            "kvant.attach the model, or leave the window out"
        )
    sinks, columns = view.page_table.layer_group.sinks, view.page_table.num_columns
    may_hide_sinks = not view.page_table.has_padding and mask.shape[-1] == columns
    if may_hide_sinks and sinks and not bool(mask[:, :, -1, :sinks].all()):
        raise make_missing_padding_error()
    k = torch.arange(columns - mask.shape[-1], columns, device=mask.device)
    q = torch.arange(columns - num_queries, columns, device=mask.device)
    start = torch.tensor(_compute_padding(view), device=mask.device).view(-1, 1, 1, 1)
    rule = replace(view.mask, causal=False, chunk=None)  # the mask has these already
    return mask & evaluate_mask(rule, q[:, None] - start, k - start)


def intersect_rules(view_rule: Mask, model_rule: Mask) -> Mask:
    """Intersect two rules of the same layer, of which one is narrower."""
    windows = [w for w in (view_rule.window, model_rule.window) if w is not None]
    return replace(
        view_rule, window=min(windows, default=None), chunk=view_rule.chunk or model_rule.chunk
    )
