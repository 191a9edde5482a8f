"""Shared setup of every test: the same seed, one thread, reproducible hypothesis examples."""

import gc
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from foreign import ALL_TABLES, RowSteps, install_package
from kvant import native, register_codec
from kvant.cache import layout

# Triton reads this at its first import.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

FOLDER_NUMBERS = itertools.count()  # `mktemp` would list all earlier folders at each test

# A busy machine must not fail a test, so nothing here is timed.
settings.register_profile(
    "kvant", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvant")

# Tests run in parallel on small tensors: more threads would only wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--library", help="a folder with a native library to run in place of ours")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("library"):
        native.__path__.insert(0, config.getoption("library"))


def pytest_collection_finish() -> None:
    """Exempt modules and test items from garbage collection: each full pass would visit them."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count skipped tests by their reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, count in Counter(report.longrepr[2] for report in skipped).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def extensions() -> Iterator[None]:
    """Forget the extensions that a test registers or installs."""
    before = [(table, dict(vars(table)), dict(table._added)) for table in ALL_TABLES]
    yield
    for table, attributes, added in before:
        vars(table).clear()
        vars(table).update(attributes, _added=added)


@pytest.fixture
def foreign_codec(extensions: None) -> None:
    """Register the codec `rowsteps`."""
    register_codec("rowsteps", RowSteps)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Install a package with extensions for the length of a test: see `install_package`."""
    return partial(install_package, tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def verdicts(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty folder for verdicts and unlimited probing time, for busy machines."""
    home = tmp_path_factory.getbasetemp() / f"cache{next(FOLDER_NUMBERS)}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr("kvant.probing.guard.TRIAL_SECONDS", math.inf)
    return home / "kvant" / "verdicts"


@pytest.fixture
def quick_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try formats on half of the text and one recall exam, where the verdict does not matter."""
    from kvant.probing import trials

    monkeypatch.setattr(trials, "MAX_TRIAL_TOKENS", trials.MIN_EXAM_TOKENS)
    monkeypatch.setattr(trials, "NUM_EXAMS", 1)


@pytest.fixture
def gpu_page_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store sealed pages in the file layout instead of the native kernels' layout."""
    monkeypatch.setattr(layout, "select_tiles", lambda device: None)


@pytest.fixture
def every_draft_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify drafts whether that is faster or not, which depends on the machine."""
    from generation.draft_times import GreedySizer  # Triton must not be imported before

    for module in ("generation.loop", "engine.drafts"):
        monkeypatch.setattr(f"kvant.{module}.DraftSizer", GreedySizer)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Use two threads instead of the usual one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
