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

KEY_DEPTHS = (1, 4, 16, 64, 256)  # pages under one key
LOAD_BOUND = 1.25  # times the mean load: more than that is beyond the part of a server
SPARE_REQUESTS = 8  # requests beyond the bound that burden nobody
OVERLOAD_WEIGHT = 4.0  # of a load twice that, beside a request that was had as a whole
LOAD_WEIGHT = 0.1  # of the mean load, beside the same: what little is shared by all draws nobody
LOAD_HALF_LIFE = 64  # requests of each server after which one of them counts half
MAX_KEYS = 1 << 18  # that are known of all servers
HASH_MIX_STEPS = (
    (30, 0xBF58476D1CE4E5B9),
    (27, 0x94D049BB133111EB),
)  # shifts and odd factors of a hash

ServerT = TypeVar("ServerT", bound=Hashable)


def make_keys(pages: Sequence[bytes], salt: bytes = b"") -> list[bytes]:
    """The names of the first 1, 4, 16 … of these pages, for those who have the same salt."""
    found = list[bytes]()
    chain = blake2b(digest_size=16, key=salt)
    for count, page in enumerate(pages[: KEY_DEPTHS[-1]], 1):
        chain.update(len(page).to_bytes(4, "little"))
        chain.update(page)
        if count in KEY_DEPTHS:
            found.append(chain.digest())
    return found


class PrefixRouter(Generic[ServerT]):
    """What each of some servers had lately, and what it has to do."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._index: dict[ServerT, int] = {}  # in the arrays
        self._keys_by_server: dict[ServerT, OrderedDict[bytes, None]] = {}  # keys, the newest last
        self._servers_by_key: dict[bytes, set[ServerT]] = {}
        self._server_hashes = np.zeros(0, np.uint64)  # of servers, for rendezvous
        self._num_ongoing = np.zeros(0)
        self._recent_requests = np.zeros(0)  # requests, each counting less the longer ago it came
        self._recent_new_requests = np.zeros(0)  # those of them that nobody had anything of
        self._request_weight = 1.0  # what a request counts now in both

    @property
    def servers(self) -> tuple[ServerT, ...]:
        return tuple(self._index)

    @property
    def loads(self) -> NDArray[np.float64]:
        """What each has to do and had to do lately, in requests."""
        return self._num_ongoing + self._recent_requests / self._request_weight

    def add_server(self, server: ServerT) -> None:
        """It counts as one that had its part: else all that is new would be its own."""
        if server in self._index:
            return
        self._index[server] = len(self._index)
        self._keys_by_server[server] = OrderedDict()
        mark = blake2b(str(server).encode(), digest_size=8).digest()
        self._server_hashes = np.append(self._server_hashes, np.frombuffer(mark, np.uint64))
        self._num_ongoing = np.append(self._num_ongoing, 0.0)
        self._recent_requests, self._recent_new_requests = (
            _append_mean(self._recent_requests),
            _append_mean(self._recent_new_requests),
        )

    def remove_server(self, server: ServerT) -> None:
        if server not in self._index:
            return
        for key in self._keys_by_server.pop(server):
            self._remove_key(key, server)
        place = self._index.pop(server)
        self._index = {one: at for at, one in enumerate(self._index)}
        self._server_hashes = np.delete(self._server_hashes, place)
        self._num_ongoing = np.delete(self._num_ongoing, place)
        self._recent_requests = np.delete(self._recent_requests, place)
        self._recent_new_requests = np.delete(self._recent_new_requests, place)

    def rank_servers(self, keys: Sequence[bytes], num_pages: int) -> list[ServerT]:
        """The servers for a request of these keys and so many pages, the best one first."""
        if not self._index:
            return []
        loads, shares = self.loads, self._compute_hit_shares(keys, num_pages)
        if shares.any():
            beyond = np.maximum(0.0, loads / (LOAD_BOUND * loads.mean() + SPARE_REQUESTS) - 1.0)
            score = shares - LOAD_WEIGHT * loads / max(1.0, loads.mean()) - OVERLOAD_WEIGHT * beyond
            order = np.argsort(-score, kind="stable")
        else:
            began = self._recent_new_requests / self._request_weight
            part = max(1.0, LOAD_BOUND * (began.sum() + 1) / len(began))
            order = np.lexsort((self._compute_hash_order(keys), began + 1 > part))
        servers = self.servers
        return [servers[place] for place in order]

    def assign_request(self, server: ServerT, keys: Sequence[bytes]) -> None:
        """It is to have a request of these keys."""
        place = self._index[server]
        self._recent_requests[place] += self._request_weight
        if keys and not any(key in self._servers_by_key for key in keys):
            self._recent_new_requests[place] += self._request_weight
        self._request_weight *= 2 ** (1 / (LOAD_HALF_LIFE * len(self._index)))
        if self._request_weight > 2.0**512:
            self._recent_requests, self._recent_new_requests = (
                self._recent_requests / self._request_weight,
                self._recent_new_requests / self._request_weight,
            )
            self._request_weight = 1.0
        self.add_keys(server, keys)

    def start_request(self, server: ServerT) -> None:
        """One of its requests begins."""
        self._num_ongoing[self._index[server]] += 1

    def finish_request(self, server: ServerT) -> None:
        """One of its requests has ended."""
        place = self._index.get(server)
        if place is not None:
            self._num_ongoing[place] = max(0.0, self._num_ongoing[place] - 1)

    def add_keys(self, server: ServerT, keys: Iterable[bytes]) -> None:
        """It has these, whoever sent them there; the newest last."""
        had = self._keys_by_server[server]
        for key in keys:
            had[key] = None
            had.move_to_end(key)
            self._servers_by_key.setdefault(key, set()).add(server)
        while len(had) > max(1, self._max_keys // len(self._index)):
            self._remove_key(had.popitem(last=False)[0], server)

    def _remove_key(self, key: bytes, server: ServerT) -> None:
        holders = self._servers_by_key[key]
        holders.discard(server)
        if not holders:
            del self._servers_by_key[key]

    def _compute_hit_shares(self, keys: Sequence[bytes], num_pages: int) -> NDArray[np.float64]:
        """How much of a request each of them had."""
        shares = np.zeros(len(self._index))
        for depth, key in zip(KEY_DEPTHS, keys, strict=False):
            places = [self._index[server] for server in self._servers_by_key.get(key, ())]
            shares[places] = depth / num_pages
        return shares

    def _compute_hash_order(self, keys: Sequence[bytes]) -> NDArray[Any]:
        """In which order they come for something new: another one for every first page.

        Where there is no page it is by what they have to do.
        """
        if not keys:
            return self.loads
        mixed = self._server_hashes ^ np.frombuffer(keys[0][:8], np.uint64)
        for shift, factor in HASH_MIX_STEPS:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed


def _append_mean(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.append(counts, counts.mean() if len(counts) else 0.0)
