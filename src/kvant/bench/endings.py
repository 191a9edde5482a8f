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

from kvant.errors import CacheError


@contextmanager
def ending() -> Iterator[None]:
    """Turn what ends a command into its exit code."""
    try:
        yield
    except (CacheError, ValueError) as error:
        _end(error, 2)
    except OSError as error:
        _end(error, 1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise SystemExit(130) from None


def _end(error: Exception, code: int) -> NoReturn:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    print(f"error: {lines[0]}", file=sys.stderr)
    raise SystemExit(code) from None
