"""Streaming generation over a cache of any format.

`kvant.generate` turns a prompt into a stream of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvant.lazy import lazy_names

if TYPE_CHECKING:
    from kvant.generation.conversation import Messages
    from kvant.generation.decoder import TransformersDecoder
    from kvant.generation.grammar import Grammar
    from kvant.generation.loop import Step, generate
    from kvant.generation.session import Session
    from kvant.generation.settings import Sampling

__all__ = ["Grammar", "Messages", "Sampling", "Session", "Step", "TransformersDecoder", "generate"]

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "kvant.generation.conversation": "Messages",
            "kvant.generation.decoder": "TransformersDecoder",
            "kvant.generation.grammar": "Grammar",
            "kvant.generation.loop": "Step generate",
            "kvant.generation.session": "Session",
            "kvant.generation.settings": "Sampling",
        },
    )
