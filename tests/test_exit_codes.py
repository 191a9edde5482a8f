"""Test exit codes of commands."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from kvant.errors import CapacityError
from kvant.platform.terminal import handle_errors, run_app


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("--lengths a\nand more"), 2, "error: --lengths a\n"),
        (CapacityError("too long"), 2, "error: too long\n"),
        (ValueError(), 2, "error: ValueError\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
    ids=repr,
)
def test_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, handle_errors():
        raise error
    assert (end.value.code, *capsys.readouterr()) == (code, "", message)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "\ninterrupted\n"), (ValueError("wrong"), 2, "error: wrong\n")],
    ids=repr,
)
def test_command_exits_the_same_way(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def ask() -> None:
        raise error

    with pytest.raises(SystemExit) as end, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ask"])
        run_app(app)
    assert (end.value.code, *capsys.readouterr()) == (code, "", message)


def test_ctrl_c_while_the_command_is_imported_is_one_line() -> None:
    script = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'kvant.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "from kvant_command import main\n"
        "main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "\ninterrupted\n")


def test_internal_error_keeps_its_traceback() -> None:
    with pytest.raises(AssertionError), handle_errors():
        raise AssertionError
