"""Fixtures of servers and of the command line."""

from cli.conftest import call
from server.conftest import bundled_model, running

__all__ = ["bundled_model", "call", "running"]
