"""What the layers of one host's cache share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvant.cache import Cache
from kvant.errors import CacheError


@dataclass
class AttentionStats:
    """How often attention was computed on the stored pages, and how often it was not."""

    fused_calls: int = 0
    prompt_calls: int = 0  # first chunks, which see nothing but their own rows
    materialized: Counter[str] = field(default_factory=Counter)  # by the operation that did it
    tensor_masks: int = 0  # masks of the host that attention had to take as they were

    def add(self, other: AttentionStats) -> None:
        self.fused_calls += other.fused_calls
        self.prompt_calls += other.prompt_calls
        self.materialized += other.materialized
        self.tensor_masks += other.tensor_masks


@dataclass
class ReplayStats:
    """How many tokens came from a forward that was captured, and why no others do."""

    num_tokens: int = 0
    refusal: str | None = None


@dataclass(eq=False)
class CacheContext:
    """The memory behind the layers, and what they were told of the batch."""

    states: Cache
    padding: tuple[int, ...] | None = None  # columns of left padding, where they were told
    mask_columns: int | None = None  # of the attention mask with that padding
    is_cross: bool = False  # the rows of an encoder
    attachable: bool = False  # `attach` would give the model an attention of ours
    slack: int = 0  # what a speculation made all layers keep
    record_past: bool = False  # speculation: a chunk is read as single tokens would be
    first_forward_done: bool = False  # a forward has brought rows to every layer
    layers_without_rows: list[int] | None = (
        None  # layers that the last forward before that brought none
    )
    attention_stats: dict[int, AttentionStats] = field(default_factory=dict)
    replay_stats: ReplayStats = field(default_factory=ReplayStats)
    num_moves: int = 0  # of single layers, which the states are not told of

    @property
    def change_counts(self) -> tuple[int, int]:
        """Others once memory may have changed."""
        return self.states.num_changes, self.num_moves

    def compute_start(self, batch: int) -> tuple[int, ...] | None:
        """The padding of each row of a batch; beams repeat their sequence."""
        if self.padding is None:
            return None
        times, rest = divmod(batch, len(self.padding))
        if rest:
            raise ValueError(
                f"rows of {batch} sequences, but an attention_mask of {len(self.padding)}: give "
                "kvant.cache_for(..., attention_mask=...) the mask of this batch"
            )
        return tuple(p for p in self.padding for _ in range(times))

    def check_padding_columns(self, count: int) -> None:
        """Refuse more first rows than columns: padding would be taken from other rows."""
        if self.mask_columns is not None and count > self.mask_columns and any(self.padding or ()):
            raise CacheError(
                f"{count} first rows for an attention_mask of {self.mask_columns} columns: this "
                "model "
                "adds tokens of its own to the prompt, and padding would be sought among them; "
                "kvant.detach the model, or give its generate a cache from kvant.cache_for without "
                "attention_mask"
            )

    def check_not_appended(self, index: int) -> None:
        """A forward that comes to a layer again, but not to the first one, is no new one."""
        if self.states.has_appended(index) and index != min(self.states.layers):
            raise CacheError(
                f"layer {index} got rows twice in one forward: if the second ones are of an "
                "encoder, they need a cache of their own; say add_cross_attention=True in the "
                "configuration of this model"
            )

    def check_first_forward(self, length: int, count: int) -> None:
        """A layer that is never appended to would undo every forward of the others.

        `held` rows of a layer before `count` more: when a first forward died, its repetition has
        the same prompt, and is let through, once.
        """
        if self.first_forward_done or not length:
            return
        self.first_forward_done = self.states.length > 0
        if self.first_forward_done:
            return
        before = self.layers_without_rows
        self.layers_without_rows = silent = [
            i for i, state in self.states.layers.items() if state.length == 0
        ]
        if count != length or silent == before:
            raise CacheError(
                f"the first forward brought no rows to layers {silent}: if it died, reset the "
                "cache; if this model never uses them, kvant cannot cache it"
            )
