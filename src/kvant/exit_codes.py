"""How a command ends, whether it is one of `kvant` or `python -m kvant.bench.NAME`.

What the user typed or pointed at is wrong: one line on standard error, exit code 2. Anything else
that the system refuses is one line too, exit code 1. Ctrl-C ends tidily. An error of our own keeps
its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from kvant.errors import CacheError

INTERRUPTED_CODE = 130


def run_app(app: typer.Typer) -> NoReturn:
    """Run a command as it was typed, to its end."""
    with handle_errors():
        code = app(standalone_mode=False)
        if code == INTERRUPTED_CODE:  # what Typer makes of Ctrl-C, without a word
            raise KeyboardInterrupt
        raise SystemExit(code)


@contextmanager
def handle_errors() -> Iterator[None]:
    """Turn what ends a command into its exit code."""
    try:
        yield
    except TyperException as error:
        _exit_with_error(error.format_message(), error.exit_code)
    except (CacheError, ValueError) as error:
        _exit_with_error(str(error) or type(error).__name__, 2)
    except (OSError, MemoryError) as error:
        _exit_with_error(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED_CODE) from None


def print_error(message: str) -> None:
    """One line, or none where help was shown in its place."""
    for line in message.strip().splitlines()[:1]:
        print(f"error: {line}", file=sys.stderr)


def _exit_with_error(message: str, code: int) -> NoReturn:
    print_error(message)
    raise SystemExit(code) from None
