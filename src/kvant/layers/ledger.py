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
from typing import NamedTuple

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


def nothing() -> None:
    """All is done once the states are."""


class Verb(NamedTuple):
    """A verb on all states that has begun, and how it is brought to its end."""

    name: str
    length: int  # that the states have then
    end: Callable[[LayerState], None] | None  # may be done again; None: there is no way
    then: Callable[[], None] = nothing  # likewise


class Together:
    """The ledger of a cache: appends are committed when every state has one.

    An exception, Ctrl-C among them, may come between any two instructions; all states act
    nevertheless, or none does. A forward is kept from the moment on at which its last state has
    arrived, which is one assignment; a verb is noted, by one assignment too, before it changes the
    first state. Whatever comes next first ends what was interrupted before it, and `length` is the
    one that there will be then.
    """

    def __init__(self, states: Sequence[LayerState], followers: Sequence[Follower] = ()) -> None:
        self.states = tuple(states)
        self.followers = tuple(followers)
        self.forward = Forward()
        self.unfinished: Verb | None = None
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
        if self.unfinished is not None:
            return self.unfinished.length
        if self.forward.opened and not self._complete:
            return self.forward.before
        return self._reached()

    @property
    def whole(self) -> bool:
        """Are all states where the others are?"""
        return self.unfinished is None and (not self.forward.arrived or self._complete)

    @property
    def _complete(self) -> bool:
        return len(self.forward.arrived) == len(self.states)

    def opening(self, state: LayerState) -> None:
        self.changes += 1
        if self.unfinished is not None or id(state) in self.forward.arrived:
            self.rollback()
        elif id(state) in self.forward.opened:
            state.rollback()  # its append died before it was counted
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

        Every verb begins with it. A verb, or a forward that was kept, is brought to its end where
        it was interrupted.
        """
        self.changes += 1
        if self.unfinished is not None:
            self._end(self.unfinished)
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

    def each(
        self,
        name: str,
        act: Callable[[LayerState], None],
        *,
        length: int | None = None,
        then: Callable[[], None] = nothing,
    ) -> None:
        """A verb that may be done again to a state that it was done to."""
        self.rollback()
        self._act(act, Verb(name, self.length if length is None else length, act, then))

    def anew(self, name: str, act: Callable[[LayerState], None]) -> None:
        """The same of a verb behind which there are no tokens: nothing before it matters."""
        self._act(act, Verb(name, 0, act))
        self.rollback()

    def once(self, name: str, act: Callable[[LayerState], None]) -> None:
        """A verb that cannot be done again, and for which there is no memory to undo it."""
        self.rollback()
        self._act(act, Verb(name, self.length, None))

    @contextmanager
    def staged(self, name: str, then: Callable[[], None] = nothing) -> Iterator[None]:
        """Within, states change as an append changes them; all of it is kept, or none."""
        self.rollback()
        self.unfinished = Verb(name, self.length, lambda state: state.rollback())
        try:
            yield
        except BaseException:
            self._end(self.unfinished)
            raise
        # From here on it is kept.
        self.unfinished = Verb(name, self._reached(), lambda state: state.commit(), then)
        self._end(self.unfinished)

    def _act(self, act: Callable[[LayerState], None], verb: Verb) -> None:
        self.changes += 1
        self.unfinished, done = verb, 0
        try:
            for state in (*self.followers, *self.states):  # followers are those that refuse
                act(state)
                done += 1
        except Exception:
            if done == 0:  # it was refused before anything changed
                self.unfinished = None
            raise
        verb.then()
        self.unfinished = None

    def _end(self, verb: Verb) -> None:
        way_out = (
            f"{verb.name} was interrupted, and some layers may have changed without the others"
        )
        if verb.end is None:
            raise CacheError(f"{way_out}: reset() or clear() the cache")
        try:
            for state in (*self.followers, *self.states):
                verb.end(state)
        except CacheError as error:
            raise CacheError(f"{way_out} ({error}): reset() or clear() the cache") from error
        verb.then()
        self.unfinished = None

    def _reached(self) -> int:
        return min((state.length for state in (*self.followers, *self.states)), default=0)

    def _keep(self) -> None:
        for state in self.states:
            state.commit()
        if self.followers:
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
