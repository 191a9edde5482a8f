"""A simulated GPU for benchmarks."""

from __future__ import annotations

from itertools import count

import pytest
import torch


@pytest.fixture
def stream_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operations queued on the stream, in order; any two events are 250 milliseconds apart."""
    log: list[str] = []
    names = count()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing  # otherwise events have no time
            self.name = f"event {next(names)}"

        def record(self) -> None:
            log.append(self.name)

        def synchronize(self) -> None:
            log.append(f"wait for {self.name}")

        def elapsed_time(self, end: Event) -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("settle"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("hold"))
    return log
