"""The library's own loop: streaming generation over a cache of any format.

`kvant.generate` is one call from a prompt to a stream of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvant.lazy import lazy_names

if TYPE_CHECKING:
    from kvant.generation.conversation import Messages
    from kvant.generation.decoder import TransformersDecoder
    from kvant.generation.grammar import Grammar
    from kvant.generation.loop import Step
    from kvant.generation.session import Session
    from kvant.generation.settings import Sampling
    from kvant.generation.stream import generate

__all__ = ["Grammar", "Messages", "Sampling", "Session", "Step", "TransformersDecoder", "generate"]

if not TYPE_CHECKING:  # or any name would be a good one
    __getattr__ = lazy_names(
        __name__,
        {
            "Grammar": "kvant.generation.grammar",
            "TransformersDecoder": "kvant.generation.decoder",
            "Messages": "kvant.generation.conversation",
            "Sampling": "kvant.generation.settings",
            "Session": "kvant.generation.session",
            "Step": "kvant.generation.loop",
            "generate": "kvant.generation.stream",
        },
    )
