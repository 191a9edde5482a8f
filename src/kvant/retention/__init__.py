"""Retention rules by name. Adding a line here gives a rule its name in the header of a file."""

from __future__ import annotations

from kvant.contracts import Retention
from kvant.retention.all import All
from kvant.retention.window import Window

RETENTIONS: dict[str, type[Retention]] = {"all": All, "window": Window}

__all__ = ["RETENTIONS", "All", "Window"]
