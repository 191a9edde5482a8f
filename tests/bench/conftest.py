"""A GPU that is not there, played for those who would use it."""

from __future__ import annotations

from itertools import count

import pytest
import torch


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What its stream was asked for, in order; between any two events lie 250 milliseconds."""
    asked: list[str] = []
    names = count()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing  # or it has no time
            self.name = f"event {next(names)}"

        def record(self) -> None:
            asked.append(self.name)

        def synchronize(self) -> None:
            asked.append(f"wait for {self.name}")

        def elapsed_time(self, end: Event) -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("settle"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: asked.append("hold"))
    return asked
