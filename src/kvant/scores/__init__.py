"""Which rows of a prompt matter most: a file and a line in SCORES for each way to tell."""

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
