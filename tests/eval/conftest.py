"""Fixtures of the command line."""

from cli.conftest import call

__all__ = ["call"]
