"""Test progress of long work on standard error without a terminal; short work prints none."""

from __future__ import annotations

import pytest

from kvant.platform import terminal
from kvant.platform.terminal import ProgressBar, format_duration


class Clock:
    """A clock advanced by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(terminal, "monotonic", clock)
    return clock


def test_progress_prints_every_ten_seconds_with_the_time_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar("measuring") as bar:
        for done in range(1, 41):
            clock.now += 1
            bar.update(done, 100)
    out, error = capsys.readouterr()
    assert out == ""
    assert error.splitlines() == [
        "measuring: 10 of 100, about 2 min left",
        "measuring: 20 of 100, about 80 s left",
        "measuring: 30 of 100, about 70 s left",
        "measuring: 40 of 100, about 60 s left",
    ]


def test_slow_first_step_prints_a_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("measuring") as bar:
        clock.now += 600
        bar.update(1, 31)
    assert capsys.readouterr().err == "measuring: 1 of 31, about 5.0 h left\n"


def test_resumed_work_does_not_count_as_fast(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar("prompts") as bar:
        bar.update(900, 1000)
        clock.now += 10
        bar.update(901, 1000)
    assert capsys.readouterr().err == "prompts: 901 of 1000, about 16 min left\n"


def test_time_left_is_omitted_before_the_first_step(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar("trying") as bar:
        bar.update(0, 22)
        clock.now += 20
        bar.update(0, 22)
    assert capsys.readouterr().err == "trying: 0 of 22\n"


@pytest.mark.parametrize("quiet", [False, True])
def test_short_work_and_quiet_work_print_nothing(
    quiet: bool, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar("measuring", quiet=quiet) as bar:
        clock.now += 1000 if quiet else 9
        bar.update(1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (7200, "2.0 h")],
)
def test_durations_are_human_readable(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_lines_printed_while_the_bar_is_hidden_go_to_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich redirects standard output to standard error while a bar is shown."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with ProgressBar("measuring") as bar:
        bar.update(1, 2)
        with bar.hide():
            print("a row")
        bar.update(2, 2)
    out, error = capsys.readouterr()
    assert out == "a row\n" and "2/2" in error
