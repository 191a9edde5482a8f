"""The two caches of a model that reads an encoder: its own rows, and the encoder's."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import EncoderDecoderCache

from kvant.hf.cache import HostCache
from kvant.hf.explanation import Explanation


class PairedCache(EncoderDecoderCache):
    """Both are ours; the second is written once and read by every later token."""

    self_attention_cache: HostCache
    cross_attention_cache: HostCache

    def check_dynamic_cache(self, method: str) -> None:
        """The host asks for its own class before it crops or selects: ours can do both."""

    def fork(self) -> PairedCache:
        twin = PairedCache(self.self_attention_cache.fork(), self.cross_attention_cache.fork())
        twin.is_updated = dict(self.is_updated)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> PairedCache:
        return self.fork()

    def trim(self, count: int) -> int:
        """Drop the newest `count` tokens that were generated, or all; how many that was."""
        return self.self_attention_cache.trim(count)

    def clear(self) -> None:
        """Forget the tokens, those of the encoder too, and free the memory."""
        self.reset()
        self.self_attention_cache.clear()
        self.cross_attention_cache.clear()

    def stats(self) -> dict[str, Any]:
        return {
            "self": self.self_attention_cache.stats(),
            "cross": self.cross_attention_cache.stats(),
        }

    def explain(self) -> Explanation:
        own, cross = self.self_attention_cache.explain(), self.cross_attention_cache.explain()
        return Explanation(
            tuple(f"own rows: {line}" for line in own.lines)
            + tuple(f"rows of the encoder: {line}" for line in cross.lines)
        )
