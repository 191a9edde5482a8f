"""What happened to a cache, or one layer of it, in a host's hands: for `explain` and `stats`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Notes:
    """How often attention was computed on the stored pages, and how often it was not."""

    fused: int = 0
    prompts: int = 0  # first chunks, which see nothing but their own rows
    materialized: Counter[str] = field(default_factory=Counter)  # by the operation that did it
    masks: int = 0  # masks of the host that attention had to take as they were

    def add(self, other: Notes) -> None:
        self.fused += other.fused
        self.prompts += other.prompts
        self.materialized += other.materialized
        self.masks += other.masks


@dataclass
class Replays:
    """How many tokens came from a forward that was captured, and why no others do."""

    tokens: int = 0
    refusal: str | None = None
