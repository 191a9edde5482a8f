"""The command `kvant` before it is imported: that takes seconds, in which Ctrl-C may be pressed."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point that the installation makes."""
    try:
        from kvant.cli.main import main as begin
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
    begin()
