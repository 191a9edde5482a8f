"""Which of several servers a request goes to: where what it begins with was read.

A request goes to the server with the highest score: the share of its pages that a server had, less
what that server has to do. What nobody had goes to a server by its first page (rendezvous hashing
with bounded load), so that what begins alike meets there, whoever sends it. Whoever joins is given
its part of what is new; nothing else moves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

DEPTHS = (1, 4, 16, 64, 256)  # pages under one key
BOUND = 1.25  # times the mean load: more than that is beyond the part of a server
SPARE = 8  # requests beyond the bound that burden nobody
WEIGHT = 4.0  # of a load twice that, beside a request that was had as a whole
EVEN = 0.1  # of the mean load, beside the same: what little is shared by all draws nobody
HALVED = 64  # requests of each server after which one of them counts half
MOST_KEYS = 1 << 18  # that are known of all servers
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shifts and odd factors of a hash

Server = TypeVar("Server", bound=Hashable)


def keys(pages: Sequence[bytes], salt: bytes = b"") -> list[bytes]:
    """The names of the first 1, 4, 16 … of these pages, for those who have the same salt."""
    found = list[bytes]()
    chain = blake2b(digest_size=16, key=salt)
    for count, page in enumerate(pages[: DEPTHS[-1]], 1):
        chain.update(len(page).to_bytes(4, "little"))
        chain.update(page)
        if count in DEPTHS:
            found.append(chain.digest())
    return found


class Router(Generic[Server]):
    """What each of some servers had lately, and what it has to do."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most = most_keys
        self._places: dict[Server, int] = {}  # in the arrays
        self._had: dict[Server, OrderedDict[bytes, None]] = {}  # keys, the newest last
        self._holders: dict[bytes, set[Server]] = {}
        self._marks = np.zeros(0, np.uint64)  # of servers, for rendezvous
        self._under_way = np.zeros(0)
        self._lately = np.zeros(0)  # requests, each counting less the longer ago it came
        self._began = np.zeros(0)  # those of them that nobody had anything of
        self._unit = 1.0  # what a request counts now in both

    @property
    def servers(self) -> tuple[Server, ...]:
        return tuple(self._places)

    @property
    def loads(self) -> NDArray[np.float64]:
        """What each has to do and had to do lately, in requests."""
        return self._under_way + self._lately / self._unit

    def join(self, server: Server) -> None:
        """It counts as one that had its part: else all that is new would be its own."""
        if server in self._places:
            return
        self._places[server] = len(self._places)
        self._had[server] = OrderedDict()
        mark = blake2b(str(server).encode(), digest_size=8).digest()
        self._marks = np.append(self._marks, np.frombuffer(mark, np.uint64))
        self._under_way = np.append(self._under_way, 0.0)
        self._lately, self._began = _and_mean(self._lately), _and_mean(self._began)

    def leave(self, server: Server) -> None:
        if server not in self._places:
            return
        for key in self._had.pop(server):
            self._forget(key, server)
        place = self._places.pop(server)
        self._places = {one: at for at, one in enumerate(self._places)}
        self._marks = np.delete(self._marks, place)
        self._under_way = np.delete(self._under_way, place)
        self._lately = np.delete(self._lately, place)
        self._began = np.delete(self._began, place)

    def ranked(self, keys: Sequence[bytes], pages: int) -> list[Server]:
        """The servers for a request of these keys and so many pages, the best one first."""
        if not self._places:
            return []
        loads, shares = self.loads, self._shares(keys, pages)
        if shares.any():
            beyond = np.maximum(0.0, loads / (BOUND * loads.mean() + SPARE) - 1.0)
            score = shares - EVEN * loads / max(1.0, loads.mean()) - WEIGHT * beyond
            order = np.argsort(-score, kind="stable")
        else:
            began = self._began / self._unit
            part = max(1.0, BOUND * (began.sum() + 1) / len(began))
            order = np.lexsort((self._turns(keys), began + 1 > part))
        servers = self.servers
        return [servers[place] for place in order]

    def give(self, server: Server, keys: Sequence[bytes]) -> None:
        """It is to have a request of these keys."""
        place = self._places[server]
        self._lately[place] += self._unit
        if keys and not any(key in self._holders for key in keys):
            self._began[place] += self._unit
        self._unit *= 2 ** (1 / (HALVED * len(self._places)))
        if self._unit > 2.0**512:
            self._lately, self._began = self._lately / self._unit, self._began / self._unit
            self._unit = 1.0
        self.learn(server, keys)

    def begin(self, server: Server) -> None:
        """One of its requests begins."""
        self._under_way[self._places[server]] += 1

    def end(self, server: Server) -> None:
        """One of its requests has ended."""
        place = self._places.get(server)
        if place is not None:
            self._under_way[place] = max(0.0, self._under_way[place] - 1)

    def learn(self, server: Server, keys: Iterable[bytes]) -> None:
        """It has these, whoever sent them there; the newest last."""
        had = self._had[server]
        for key in keys:
            had[key] = None
            had.move_to_end(key)
            self._holders.setdefault(key, set()).add(server)
        while len(had) > max(1, self._most // len(self._places)):
            self._forget(had.popitem(last=False)[0], server)

    def _forget(self, key: bytes, server: Server) -> None:
        holders = self._holders[key]
        holders.discard(server)
        if not holders:
            del self._holders[key]

    def _shares(self, keys: Sequence[bytes], pages: int) -> NDArray[np.float64]:
        """How much of a request each of them had."""
        shares = np.zeros(len(self._places))
        for depth, key in zip(DEPTHS, keys, strict=False):
            places = [self._places[server] for server in self._holders.get(key, ())]
            shares[places] = depth / pages
        return shares

    def _turns(self, keys: Sequence[bytes]) -> NDArray[Any]:
        """In which order they come for something new: another one for every first page.

        Where there is no page it is by what they have to do.
        """
        if not keys:
            return self.loads
        mixed = self._marks ^ np.frombuffer(keys[0][:8], np.uint64)
        for shift, factor in MIX:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed


def _and_mean(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.append(counts, counts.mean() if len(counts) else 0.0)
