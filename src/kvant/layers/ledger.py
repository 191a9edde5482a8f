"""Who commits an append: a state of its own at once, the states of a cache together.

A forward appends to every layer once. When a layer that is ahead of the others is appended to
again, the forward that brought it there died: its rows are taken back first.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

from kvant.contracts import Follower, LayerState

log = logging.getLogger("kvant")


class Alone:
    """The ledger of a state that belongs to no cache."""

    speculating = False

    def opening(self, state: LayerState) -> None:
        return None

    def closing(self, state: LayerState) -> None:
        state.commit()


class Member:
    """What a state holds of a ledger: not so much that a cache would outlive its last user.

    Where the cache is gone, a state that is still held is one of its own.
    """

    def __init__(self, ledger: Together) -> None:
        self._ledger = weakref.ref(ledger)

    @property
    def speculating(self) -> bool:
        ledger = self._ledger()
        return ledger is not None and ledger.speculating

    def opening(self, state: LayerState) -> None:
        ledger = self._ledger()
        if ledger is not None:
            ledger.opening(state)

    def closing(self, state: LayerState) -> None:
        ledger = self._ledger()
        if ledger is None:
            state.commit()
        else:
            ledger.closing(state)


class Together:
    """The ledger of a cache: appends are committed when every state has one."""

    def __init__(self, states: Sequence[LayerState], followers: Sequence[Follower] = ()) -> None:
        self.states = tuple(states)
        self.followers = tuple(followers)
        self.ahead: dict[int, LayerState] = {}  # by identity
        self.abandoned = 0
        self.changes = 0  # appends and verbs, by which memory may have changed
        self.speculating = False
        for state in self.states:
            state.ledger = Member(self)

    def opening(self, state: LayerState) -> None:
        self.changes += 1
        if id(state) in self.ahead:
            self.rollback()

    def closing(self, state: LayerState) -> None:
        self.changes += 1
        self.ahead[id(state)] = state
        if len(self.ahead) < len(self.states):
            return
        batches = sorted({other.batch for other in self.states} - {0})
        if len(batches) > 1:
            self._undo()
            raise ValueError(f"layers with batches of {batches}: a forward needs one; it is undone")
        lengths = sorted({other.length for other in self.states})
        if len(lengths) > 1:
            log.warning("layers hold different numbers of tokens: %s", lengths)
        for other in self.states:
            other.commit()
        for follower in self.followers:
            follower.follow(lengths[0])
        self.ahead = {}

    def rollback(self) -> None:
        """Take back what a forward that never reached every layer has appended.

        Every verb begins with it.
        """
        self.changes += 1
        if not self.ahead:
            return
        log.warning(
            "a forward appended to %d of %d layers and was abandoned: its tokens are taken back",
            len(self.ahead),
            len(self.states),
        )
        self.abandoned += 1
        self._undo()

    def _undo(self) -> None:
        for state in self.ahead.values():
            state.rollback()
        self.ahead = {}
        for follower in self.followers:
            follower.lose()
