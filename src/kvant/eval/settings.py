"""How much is measured. The same settings, text and model are the same measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The defaults are for a small model on a few cores: two minutes for four formats."""

    tokens: int = 16384  # of text, whose every next token is predicted
    context: int = 2048  # tokens of a piece of it, or what the model has positions for
    prompts: int = 8  # pieces that are continued, and pieces that something is planted in
    continued: int = 64  # tokens that a prompt is continued by
    seed: int = 0  # of what is planted, and of the intervals

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("context", 2), ("prompts", 1), ("continued", 2)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}={value}: {least} or more is needed")
