"""The state that the layers of one TransformersCache share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvant.cache import Cache
from kvant.errors import CacheError


@dataclass
class AttentionStats:
    """Attention calls of one layer, by how its rows were read."""

    fused_calls: int = 0  # computed on the stored pages
    prompt_calls: int = 0  # first chunks, which attend to their own rows only
    materialized: Counter[str] = field(default_factory=Counter)  # by the operation that needed it
    tensor_masks: int = 0  # masks that could not be replaced by a rule

    def add(self, other: AttentionStats) -> None:
        self.fused_calls += other.fused_calls
        self.prompt_calls += other.prompt_calls
        self.materialized += other.materialized
        self.tensor_masks += other.tensor_masks


@dataclass
class ReplayStats:
    """Tokens computed by a replayed forward, and why the last one was not."""

    num_tokens: int = 0
    refusal: str | None = None


@dataclass(eq=False)
class CacheContext:
    """The cache that the layers write to, and facts about the batch."""

    states: Cache
    padding: tuple[int, ...] | None = None  # columns of left padding, None if unknown
    mask_columns: int | None = None  # columns of the attention mask with that padding
    is_cross: bool = False  # the rows of an encoder
    attachable: bool = False  # `attach` can switch the model to kvant's attention
    slack: int = 0  # the minimum that speculation set for all layers
    record_past: bool = False  # speculation: a chunk attends as single tokens would
    first_forward_done: bool = False  # a forward appended rows to every layer
    layers_without_rows: list[int] | None = None  # those that an incomplete first forward left
    attention_stats: dict[int, AttentionStats] = field(default_factory=dict)
    replay_stats: ReplayStats = field(default_factory=ReplayStats)
    num_moves: int = 0  # of single layers between devices, which `states` does not count

    @property
    def change_counts(self) -> tuple[int, int]:
        """Counters that differ once the addresses of tensors may have changed."""
        return self.states.holder.num_changes, self.num_moves

    def compute_start(self, batch: int) -> tuple[int, ...] | None:
        """Return the padding of each row of a batch; beams repeat that of their sequence."""
        if self.padding is None:
            return None
        repeats, remainder = divmod(batch, len(self.padding))
        if remainder:
            raise ValueError(
                f"rows of {batch} sequences, but an attention_mask of {len(self.padding)}: give "
                "kvant.cache_for(..., attention_mask=...) the mask of this batch"
            )
        return tuple(p for p in self.padding for _ in range(repeats))

    def check_padding_columns(self, count: int) -> None:
        """Refuse a first chunk longer than the mask: its padding columns would be wrong."""
        if self.mask_columns is not None and count > self.mask_columns and any(self.padding or ()):
            raise CacheError(
                f"{count} first rows for an attention_mask of {self.mask_columns} columns: this "
                "model adds tokens to the prompt, so the columns of padding are unknown; "
                "kvant.detach the model, or give its generate a cache from kvant.cache_for without "
                "attention_mask"
            )

    def check_not_appended(self, index: int) -> None:
        """Refuse a second append to a layer in one forward; the first layer starts a new one."""
        if index != min(self.states.layers):
            raise CacheError(
                f"layer {index} got rows twice in one forward: if the second rows are of an "
                "encoder, they need a separate cache; set add_cross_attention=True in the "
                "configuration of this model"
            )

    def check_first_forward(self, length: int, count: int) -> None:
        """Refuse a model that never appends to some layer: every forward would be rolled back.

        `length` is that of a layer before it appends `count` rows. After a failed first forward,
        one repetition of the same prompt is allowed.
        """
        if self.first_forward_done or not length:
            return
        self.first_forward_done = self.states.length > 0
        if self.first_forward_done:
            return
        previous = self.layers_without_rows
        self.layers_without_rows = missing = [
            i for i, state in self.states.layers.items() if state.length == 0
        ]
        if count != length or missing == previous:
            raise CacheError(
                f"the first forward appended no rows to layers {missing}: if it failed, reset the "
                "cache; if this model never uses these layers, kvant cannot cache it"
            )
