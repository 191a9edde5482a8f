"""The command `kvant` before it is imported: that takes seconds, in which Ctrl-C may be pressed."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn


def exit_on_signals() -> None:
    """Exit with 0 on SIGTERM or Ctrl-C: a server that only starts has nothing to drain."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(0)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, end)


def main() -> None:
    """The entry point that the installation makes."""
    if sys.argv[1:2] == ["serve"]:
        exit_on_signals()
    try:
        from kvant.cli.main import main as begin
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
    begin()
