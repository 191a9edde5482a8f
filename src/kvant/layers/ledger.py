"""Who commits an append: a state of its own at once, the states of a cache together.

A forward appends to every layer once. When a layer that is ahead of the others is appended to
again, the forward that brought it there died: its rows are taken back first.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvant.contracts import Follower, LayerState
from kvant.errors import CacheError

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

    def __deepcopy__(self, memo: dict[int, object]) -> Alone:
        """A copy of a state belongs to no cache."""
        return Alone()

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


@dataclass
class Forward:
    """The rows under way: who was asked to take them, and who has them."""

    opened: dict[int, LayerState] = field(default_factory=dict)  # by identity
    arrived: dict[int, LayerState] = field(default_factory=dict)
    before: int = 0  # the length of all of them when it began
    verb: bool = False  # all states at once: nothing came that a follower could follow


class Together:
    """The ledger of a cache: appends are committed when every state has one.

    An exception, Ctrl-C among them, may come between any two instructions; all states or none act
    nevertheless. A forward is kept from the moment on at which its last state has arrived, which is
    one assignment; whatever comes next first ends what was interrupted before it, by undoing it
    where it was not kept yet, and by committing it (again) where it was. A verb that can be done
    again is noted before it begins, and done again where it was interrupted.
    """

    def __init__(self, states: Sequence[LayerState], followers: Sequence[Follower] = ()) -> None:
        self.states = tuple(states)
        self.followers = tuple(followers)
        self.forward = Forward()
        self.unfinished: Callable[[], None] | None = None  # a verb, until it has ended
        self.abandoned = 0
        self.changes = 0  # appends and verbs, by which memory may have changed
        self.speculating = False
        told: set[str] = set()
        for state in self.states:
            state.ledger = Member(self)
            state.tally.told = told

    @property
    def length(self) -> int:
        """Tokens that every state has, those of a forward under way not counted."""
        forward = self.forward
        if forward.opened and not self._complete:
            return forward.before
        return min((state.length for state in (*self.states, *self.followers)), default=0)

    @property
    def whole(self) -> bool:
        """Are all states where the others are?"""
        return self.unfinished is None and (not self.forward.arrived or self._complete)

    @property
    def _complete(self) -> bool:
        return len(self.forward.arrived) >= len(self.states)

    def opening(self, state: LayerState) -> None:
        self.changes += 1
        if self.unfinished is not None or id(state) in self.forward.arrived:
            self.rollback()
        if not self.forward.opened:
            self.forward.before = self.length
        self.forward.opened[id(state)] = state

    def closing(self, state: LayerState) -> None:
        self.changes += 1
        arrived = self.forward.arrived
        if len(arrived) + 1 < len(self.states):
            arrived[id(state)] = state
            return
        batches = sorted({other.batch for other in self.states} - {0})
        if len(batches) > 1:
            self._undo()
            raise ValueError(f"layers with batches of {batches}: a forward needs one; it is undone")
        lengths = sorted({other.length for other in self.states})
        if len(lengths) > 1:
            log.warning("layers hold different numbers of tokens: %s", lengths)
        arrived[id(state)] = state  # from here on the forward is kept
        self._keep()

    def rollback(self) -> None:
        """Take back what a forward that never reached every layer has appended.

        Every verb begins with it. A forward, or a verb, that was interrupted while it was kept is
        brought to its end.
        """
        self.changes += 1
        if self.unfinished is not None:
            self.unfinished()
            self.unfinished = None
        if self.forward.arrived and self._complete:
            self._keep()
        elif self.forward.opened:
            if arrived := len(self.forward.arrived):
                log.warning(
                    "a forward appended to %d of %d layers and was abandoned: its tokens are taken"
                    " back",
                    arrived,
                    len(self.states),
                )
                self.abandoned += 1
            self._undo()

    @contextmanager
    def staged(self) -> Iterator[None]:
        """Within, states change as an append changes them; all of it is kept, or none."""
        self.rollback()
        everybody = {id(state): state for state in (*self.states, *self.followers)}
        self.forward = Forward(everybody, before=self.length, verb=True)
        try:
            yield
        except BaseException:
            self._undo()
            raise
        self.forward = Forward(everybody, everybody, verb=True)  # from here on it is kept
        self._keep()

    def perform(self, verb: Callable[[], None]) -> None:
        """A verb that can be done again: once begun, it is brought to its end."""
        self.rollback()
        self._run(verb, verb)

    def begin_anew(self, verb: Callable[[], None]) -> None:
        """The same of a verb before which nothing matters."""
        self._run(verb, verb)
        self.rollback()

    def replace(self, name: str, verb: Callable[[], None]) -> None:
        """A verb for which there is no memory to undo it, and that cannot be done again."""

        def refuse() -> None:
            raise CacheError(
                f"{name} was interrupted, and some layers changed without the others: clear() or "
                "reset() the cache"
            )

        self.rollback()
        self._run(verb, refuse)

    def _run(self, verb: Callable[[], None], again: Callable[[], None]) -> None:
        self.unfinished = again
        try:
            verb()
        except CacheError:  # a state refused, and said why
            self.unfinished = None
            raise
        self.unfinished = None

    def _keep(self) -> None:
        for state in self.forward.arrived.values():
            state.commit()
        if self.followers and not self.forward.verb:
            length = min(state.length for state in self.states)
            for follower in self.followers:
                follower.follow(length)
        self.forward = Forward()

    def _undo(self) -> None:
        for state in self.forward.opened.values():
            state.rollback()
        if self.forward.arrived:
            for follower in self.followers:
                follower.lose()
        self.forward = Forward()
