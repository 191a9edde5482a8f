"""Show what a format changes: continue a text greedily with the raw cache and with the format.

The text is the one of a screen. It ends where the format changes the most likely token, at the
position of the largest divergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from kvant.probing.divergence import continue_greedily
from kvant.probing.screen import QuickScreen
from kvant.recipes import AnySpec

NUM_SHOWN_TOKENS = 12  # of the text before, and of each continuation


@dataclass(frozen=True)
class Example:
    """What a model writes after the same text with the raw cache and with a format."""

    before: str
    raw: str
    changed: str

    def describe(self, name: str) -> str:
        """Name the text and what follows it, for a sentence that begins with "after"."""
        return f"{self.before!r} raw continues {self.raw!r}, and {name} {self.changed!r}"


def find_example(screen: QuickScreen, tokenizer: Any, spec: AnySpec) -> Example | None:
    """Return the example of the most changed position; None if every top token is the same."""
    divergence = screen.measure_divergence(spec)
    changed = divergence.kl.masked_fill(divergence.same_top1, -1.0)
    position = int(changed.argmax())
    if changed[position] < 0:
        return None
    read = screen.ids[:, : position + 1]
    before = torch.cat([screen.prompt, read], 1)[0, -NUM_SHOWN_TOKENS:]
    continuations = (
        islice(continue_greedily(screen.model, read, cache), NUM_SHOWN_TOKENS)
        for cache in (screen.cache.fork(), screen.make_cache(spec))
    )
    return Example(*(tokenizer.decode(list(ids)) for ids in (before.tolist(), *continuations)))
