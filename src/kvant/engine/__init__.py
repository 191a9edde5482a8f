"""Serve concurrent requests on one transformers model within a limit of bytes."""

from kvant.engine.engine import Engine
from kvant.engine.offline import generate_many, iterate_results
from kvant.engine.stream import Result, Stream, Usage

__all__ = ["Engine", "Result", "Stream", "Usage", "generate_many", "iterate_results"]
