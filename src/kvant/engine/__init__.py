"""Serve concurrent requests on one transformers model within a limit of bytes."""

from kvant.engine.embedding import EmbeddingFuture
from kvant.engine.engine import Engine
from kvant.engine.future import RequestFuture, Usage
from kvant.engine.offline import generate_many, iterate_results
from kvant.engine.stream import Result, Stream

__all__ = [
    "EmbeddingFuture",
    "Engine",
    "RequestFuture",
    "Result",
    "Stream",
    "Usage",
    "generate_many",
    "iterate_results",
]
