"""Match the regular expressions of an adapter's configuration with the names of layers.

Python cannot stop a match, and a hostile pattern may take for ever. So patterns are matched in a
process of their own, unless they are plain names.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from reprlib import repr as short

MATCH_TIMEOUT_S = 10.0
# The end of a name, as `rank_pattern` and `alpha_pattern` have it.
PLAIN_END = re.compile(r"\(\.\*\\\.\)\?\(([A-Za-z0-9_.]+)\)")
MATCHER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
compiled = [re.compile(pattern) for pattern in patterns]
print(json.dumps([[name for name in names if p.fullmatch(name)] for p in compiled]))
"""


def match_patterns(patterns: Sequence[str], names: Sequence[str]) -> dict[str, set[str]]:
    """Return the names that each pattern matches as a whole; raise ValueError if one is invalid."""
    plain_ends = {pattern: PLAIN_END.fullmatch(pattern) for pattern in patterns}
    matches = {
        pattern: {name for name in names if f".{name}".endswith(f".{end[1]}")}
        for pattern, end in plain_ends.items()
        if end is not None
    }
    others = [pattern for pattern in patterns if pattern not in matches]
    return matches | _match_in_process(others, names) if others else matches


def _match_in_process(patterns: Sequence[str], names: Sequence[str]) -> dict[str, set[str]]:
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", "-c", MATCHER],
            input=json.dumps([patterns, names]),
            capture_output=True,
            text=True,
            timeout=MATCH_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{short(patterns)}: matching takes more than {MATCH_TIMEOUT_S:g} s: list the names"
        ) from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["the process ended"])[-1]
        raise ValueError(f"{short(patterns)}: {reason}") from None
    return dict(zip(patterns, map(set, json.loads(process.stdout)), strict=True))
