"""How far back states can go together."""

from __future__ import annotations

from collections.abc import Sequence

from kvant.contracts import LayerState
from kvant.errors import RewindError


def agreed(states: Sequence[LayerState], to: int) -> int:
    """The longest length <= `to` that every state can go back to."""
    while True:
        reach = min((state.reachable(to) for state in states), default=0)
        if reach == to or reach <= 0:
            return max(reach, 0)
        to = reach


def check_reach(state: LayerState, to: int, where: str = "") -> None:
    """Refuse a length that a state cannot go back to."""
    if not 0 <= to <= state.length or state.reachable(to) != to:
        raise RewindError(
            f"{where}length {to} cannot be reached from {state.length}: the longest that can is "
            f"{state.reachable(to)} (a window keeps `slack` rows to go back to: give the spec a "
            "larger slack=N; a recurrence goes back to its checkpoints)"
        )
