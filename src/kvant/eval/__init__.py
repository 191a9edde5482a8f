"""Measure what every format does to a model: `evaluate(model, tokenizer, formats)`."""

from kvant.eval.evaluation import evaluate
from kvant.eval.result import EvaluationResult, EvaluationSettings

__all__ = ["EvaluationResult", "EvaluationSettings", "evaluate"]
