"""One generated token, as a caller sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]  # an end token or stop string; a limit


@dataclass(frozen=True)
class Step:
    """`text` is what the token adds to what was said before: it may be nothing, or a late part."""

    token: int
    text: str
    logprob: float  # of the token, under the distribution that it was drawn from
    finish_reason: FinishReason | None = None
    drafted: bool = False  # guessed before, and verified together with others
