"""Scores that rank the rows of a cache for pruning, registered under their names in specs."""

from kvant.lazy import Registry
from kvant.retention import Score

SCORES: Registry[type[Score]] = Registry(
    {
        "snapkv": "kvant.scores.rules:SnapKV",
        "expected": "kvant.scores.rules:ExpectedAttention",
        "keydiff": "kvant.scores.rules:KeyDiff",
        "tova": "kvant.scores.rules:Tova",
        "random": "kvant.scores.rules:RandomScore",
    }
)

__all__ = ["SCORES"]
