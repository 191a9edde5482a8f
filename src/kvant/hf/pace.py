"""How recurrent layers learn how far a forward is, as the host does not tell.

Where attention follows on the first of them, a commit tells; a second beginning before that is
another forward, and the one before it died. Where nothing attends, tokens are counted as they pass
the first convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvant.errors import CacheError
from kvant.hf.detect import HostLayer
from kvant.hf.recurrence import Recurrence


class Pace:
    """Told of the first state of the first recurrent layer, which every forward asks for once."""

    def __init__(self, layers: Sequence[HostLayer], recurrences: Sequence[Recurrence]) -> None:
        self.recurrences = tuple(recurrences)
        attending = [index for index, layer in enumerate(layers) if layer.attends]
        recurring = [index for index, layer in enumerate(layers) if layer.recurs]
        self._first = (recurring[0], 0) if recurring else None
        self._counts = not attending
        self._watches = bool(attending and recurring) and recurring[0] < attending[-1]
        self._beside = bool(recurring) and recurring[0] in attending

    def asked(self, layer: int, state: int, rows: bool) -> None:
        """The host asks for a state: a forward of one token, unless `passed` says more.

        `rows` says whether any came since the last commit. Where attention is in the same layer and
        none ever did, a dead forward and a part of the model that runs alone look the same.
        """
        if (layer, state) != self._first:
            return
        empty = [one for one in self.recurrences if one.touched and one.length == 0]
        if self._beside and empty and not rows:
            raise CacheError(
                f"the state of layer {layer} is asked for again, and no rows came in between: if "
                "a forward died, reset the cache; a part of a model alone cannot be cached"
            )
        if self._counts:
            self._count(1)
        elif self._watches:
            for recurrence in self.recurrences:
                recurrence.touch()

    def passed(self, layer: int, state: int, tokens: int) -> None:
        """So many tokens pass a convolution; one of them was counted when it was asked."""
        if self._counts and (layer, state) == self._first:
            self._count(tokens - 1)

    def check(self) -> None:
        """Refuse to go on with a state that a dead forward left behind."""
        for recurrence in self.recurrences:
            recurrence.check()

    def _count(self, tokens: int) -> None:
        self.check()
        for recurrence in self.recurrences:
            recurrence.follow(recurrence.length + tokens)
