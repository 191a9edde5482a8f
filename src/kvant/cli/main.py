"""The command itself: its subcommands, and what a mistake looks like.

What the user typed or pointed at is wrong: one line on standard error, exit code 2. Anything else
that stops a command is one line too, exit code 1. Ctrl-C ends tidily.
"""

from __future__ import annotations

import sys

import typer

from kvant.cli.run import run
from kvant.errors import CacheError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(run)


@app.callback()
def about() -> None:
    """kvant: language models on a compressed key-value cache."""


def main() -> None:
    """The entry point that the installation makes."""
    try:
        app()
    except (CacheError, ValueError) as error:
        _end(error, 2)
    except OSError as error:
        _end(error, 1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise SystemExit(130) from None


def _end(error: Exception, code: int) -> None:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    print(f"error: {lines[0]}", file=sys.stderr)
    raise SystemExit(code) from None
