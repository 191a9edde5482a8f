"""Scores that rank the rows of a cache for pruning, registered under their names in specs."""

from kvant.contracts import Score
from kvant.lazy import Registry

SCORES: Registry[type[Score]] = Registry(
    {
        "snapkv": "kvant.scores.snapkv:SnapKV",
        "expected": "kvant.scores.expected:ExpectedAttention",
        "keydiff": "kvant.scores.keydiff:KeyDiff",
        "tova": "kvant.scores.tova:Tova",
        "random": "kvant.scores.random:RandomScore",
    }
)

__all__ = ["SCORES"]
