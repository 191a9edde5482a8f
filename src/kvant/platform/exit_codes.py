"""Exit codes of `kvant` commands and of `python -m kvant.bench.NAME`.

Wrong options or files print one line on standard error and exit with 2. Errors of the system print
one line and exit with 1. Ctrl-C exits with 130. A bug in kvant keeps its traceback.
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
    """Run a command and exit with its code."""
    with handle_errors():
        code = app(standalone_mode=False)
        if code == INTERRUPTED_CODE:  # Typer turns Ctrl-C into this code
            raise KeyboardInterrupt
        raise SystemExit(code)


@contextmanager
def handle_errors() -> Iterator[None]:
    """Turn exceptions into exit codes."""
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
    """Print the first line of a message; none if the command showed its help."""
    for line in message.strip().splitlines()[:1]:
        print(f"error: {line}", file=sys.stderr)


def _exit_with_error(message: str, code: int) -> NoReturn:
    print_error(message)
    raise SystemExit(code) from None
