"""What every test starts from: the same seed, one thread, reproducible hypothesis examples."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from kvant import native
from kvant.cache import storage

# Triton asks for this when it is first imported, whoever does that.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A busy machine must not fail a test, so nothing here is timed.
settings.register_profile(
    "kvant", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvant")

# Tests run side by side and their tensors are small: more threads would only wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--library", help="a folder with a native library to run in place of ours")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("library"):
        native.__path__.insert(0, config.getoption("library"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count skipped tests by their reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, count in Counter(report.longrepr[2] for report in skipped).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def verdicts(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for verdicts, and all the time to find them: a busy machine knows as much."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr("kvant.probing.guard.BUDGET", math.inf)
    return home / "kvant" / "verdicts"


@pytest.fixture
def pages_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed pages lie as files have them, and not as the native kernels like it."""
    monkeypatch.setattr(storage, "select_tiles", lambda device: None)


@pytest.fixture
def threads() -> Iterator[None]:
    """Two of them, where one is the usual number."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
