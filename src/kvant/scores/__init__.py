"""Which rows of a prompt matter most: a file and a line in SCORES for each way to tell."""

from kvant.contracts import Score
from kvant.scores.expected import Expected
from kvant.scores.keydiff import KeyDiff
from kvant.scores.random import Random
from kvant.scores.snapkv import SnapKV
from kvant.scores.tova import Tova

SCORES: dict[str, type[Score]] = {
    score.name: score for score in (SnapKV, Expected, KeyDiff, Tova, Random)
}

__all__ = ["SCORES"]
