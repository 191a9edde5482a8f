"""Prefix-aware routing: choose the server that has processed the first pages of a request.

The score of a server is the share of the request's pages it has had, minus a penalty for its load.
If no server has had the first page, its hash selects one (rendezvous hashing with bounded load).
So new requests with the same first page meet on the same server. A server that joins gets its
share of new prefixes only; known prefixes stay where they are.

A key is the chained hash of the first n pages of a request. The depths n grow by about a fifth:
agents share a long system prompt, so the first key that differs must follow soon after it.

    pages  | 0 | 1 | 2 | ... | 9 | 10 | 11 | ...
    keys   |-->|                                   key of depth 1
           |------>|                               key of depth 2
           |---------------------->|               key of depth 10
           |------------------------------>|       key of depth 11
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import pairwise
from math import log
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvant.server.protocol import ACCOUNTING_LINE, OLLAMA_TAG

MAX_KEY_DEPTH = 4096  # pages
DEPTH_GROWTH = 2**0.25
KEYLESS_PATHS = ("/v1/embeddings", "/api/embed")  # these requests use no prefixes
KEY_DEPTHS = tuple(  # pages per key
    sorted({round(DEPTH_GROWTH**n) for n in range(1 + round(log(MAX_KEY_DEPTH, DEPTH_GROWTH)))})
)
LOAD_BOUND = 1.25  # times the mean load: above it, a server is overloaded
SPARE_REQUESTS = 8  # above the bound, without a penalty
# Penalties, compared with a hit share of 1 for a request whose pages a server has had.
OVERLOAD_WEIGHT = 4.0  # for twice the bounded load
LOAD_WEIGHT = 0.1  # for the mean load: outweighs a short prefix that all requests share
LOAD_HALF_LIFE = 64  # requests per server, after which a past request counts half
MAX_KEYS = 1 << 19  # of all servers together
HASH_MIX_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift, odd factor
PAGE_BYTES = 256  # of the request's JSON: about 64 tokens
PROMPT_FIELDS = (  # in the order of a prompt
    *("instructions", "tools", "system", "context", "messages", "input", "prompt"),
)
SCOPE_FIELDS = (  # the fields of an ASGI scope that applications use, all of which pickle
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)

ServerT = TypeVar("ServerT", bound=Hashable)


def make_keys(pages: Sequence[bytes], salt: bytes = b"") -> list[bytes]:
    """Return the keys of the depths that the pages reach; `salt` separates tenants."""
    keys = list[bytes]()
    chain = blake2b(digest_size=16, key=salt)
    for begin, end in pairwise((0, *KEY_DEPTHS)):
        if end > len(pages):
            break
        for page in pages[begin:end]:
            chain.update(len(page).to_bytes(4, "little"))
            chain.update(page)
        keys.append(chain.digest())
    return keys


class PrefixRouter(Generic[ServerT]):
    """Routing state: recent keys and load of each server.

    Loads are in requests. Instead of decaying all counts at every request, the weight of a new
    request grows, and counts are divided by it when read.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._index: dict[ServerT, int] = {}  # into the arrays below
        self._keys_by_server: dict[ServerT, OrderedDict[bytes, None]] = {}  # newest key last
        self._servers_by_key: dict[bytes, set[ServerT]] = {}
        self._server_hashes = np.zeros(0, np.uint64)  # for rendezvous hashing
        self._num_ongoing = np.zeros(0)
        self._recent_requests = np.zeros(0)  # decaying count of all requests
        self._recent_new_requests = np.zeros(0)  # the same, of those without a known key
        self._request_weight = 1.0  # of the next request in both counts

    @property
    def servers(self) -> tuple[ServerT, ...]:
        return tuple(self._index)

    @property
    def loads(self) -> NDArray[np.float64]:
        """Ongoing plus recent requests of each server."""
        return self._num_ongoing + self._recent_requests / self._request_weight

    def add_server(self, server: ServerT) -> None:
        """Add a server with the mean recent load: with none, it would get all new requests."""
        if server in self._index:
            return
        self._index[server] = len(self._index)
        self._keys_by_server[server] = OrderedDict()
        digest = blake2b(str(server).encode(), digest_size=8).digest()
        self._server_hashes = np.append(self._server_hashes, np.frombuffer(digest, np.uint64))
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
        index = self._index.pop(server)
        self._index = {other: position for position, other in enumerate(self._index)}
        self._server_hashes = np.delete(self._server_hashes, index)
        self._num_ongoing = np.delete(self._num_ongoing, index)
        self._recent_requests = np.delete(self._recent_requests, index)
        self._recent_new_requests = np.delete(self._recent_new_requests, index)

    def rank_servers(self, keys: Sequence[bytes], num_pages: int) -> list[ServerT]:
        """Return all servers for a request with these keys and pages, the best one first."""
        if not self._index:
            return []
        loads, shares = self.loads, self._compute_hit_shares(keys, num_pages)
        if shares.any():
            overload = np.maximum(0.0, loads / (LOAD_BOUND * loads.mean() + SPARE_REQUESTS) - 1.0)
            load_penalty = LOAD_WEIGHT * loads / max(1.0, loads.mean())
            score = shares - load_penalty - OVERLOAD_WEIGHT * overload
            order = np.argsort(-score, kind="stable")
        else:
            new_loads = self._recent_new_requests / self._request_weight
            bound = max(1.0, LOAD_BOUND * (new_loads.sum() + 1) / len(new_loads))
            order = np.lexsort((self._compute_hash_order(keys), new_loads + 1 > bound))
        servers = self.servers
        return [servers[index] for index in order]

    def assign_request(self, server: ServerT, keys: Sequence[bytes]) -> None:
        """Count a request for a server, which will then have these keys."""
        index = self._index[server]
        self._recent_requests[index] += self._request_weight
        if keys and not any(key in self._servers_by_key for key in keys):
            self._recent_new_requests[index] += self._request_weight
        self._request_weight *= 2 ** (1 / (LOAD_HALF_LIFE * len(self._index)))
        if self._request_weight > 2.0**512:  # before it overflows
            self._recent_requests, self._recent_new_requests = (
                self._recent_requests / self._request_weight,
                self._recent_new_requests / self._request_weight,
            )
            self._request_weight = 1.0
        self.add_keys(server, keys)

    def start_request(self, server: ServerT) -> None:
        """Count an ongoing request of a server."""
        self._num_ongoing[self._index[server]] += 1

    def finish_request(self, server: ServerT) -> None:
        """Remove an ongoing request; the server may have been removed meanwhile."""
        index = self._index.get(server)
        if index is not None:
            self._num_ongoing[index] = max(0.0, self._num_ongoing[index] - 1)

    def add_keys(self, server: ServerT, keys: Iterable[bytes]) -> None:
        """Add keys to a server, the newest last; drop its oldest ones over the limit."""
        server_keys = self._keys_by_server[server]
        for key in keys:
            server_keys[key] = None
            server_keys.move_to_end(key)
            self._servers_by_key.setdefault(key, set()).add(server)
        while len(server_keys) > max(1, self._max_keys // len(self._index)):
            self._remove_key(server_keys.popitem(last=False)[0], server)

    def _remove_key(self, key: bytes, server: ServerT) -> None:
        servers = self._servers_by_key[key]
        servers.discard(server)
        if not servers:
            del self._servers_by_key[key]

    def _compute_hit_shares(self, keys: Sequence[bytes], num_pages: int) -> NDArray[np.float64]:
        """Return the share of the request's pages that each server has had."""
        shares = np.zeros(len(self._index))
        for depth, key in zip(KEY_DEPTHS, keys, strict=False):
            indices = [self._index[server] for server in self._servers_by_key.get(key, ())]
            shares[indices] = depth / num_pages
        return shares

    def _compute_hash_order(self, keys: Sequence[bytes]) -> NDArray[np.generic]:
        """Return sort keys of the servers: hashes with the first page, or loads without one."""
        if not keys:
            return self.loads
        mixed = self._server_hashes ^ np.frombuffer(keys[0][:8], np.uint64)
        for shift, factor in HASH_MIX_STEPS:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed


def _append_mean(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Append the mean of the counts, or 0 to an empty array."""
    return np.append(counts, counts.mean() if len(counts) else 0.0)


@dataclass(frozen=True)
class RoutedRequest:
    """One complete request."""

    scope: dict[str, Any]
    body: bytes
    page_keys: tuple[bytes, ...]  # of its first pages; equal for requests that share a prefix
    num_pages: int

    @classmethod
    def from_scope(
        cls,
        scope: Mapping[str, Any],
        body: bytes,
        tenant: str,
        adapters: Collection[str] = (),
    ) -> RoutedRequest:
        """Make a routed request from an ASGI scope, a body and the tenant of its key.

        Requests for one of `adapters` share a prefix only among themselves.
        """
        is_keyless = scope.get("path") in KEYLESS_PATHS
        sharing, pages = (None, []) if is_keyless else parse_prefix_pages(body, adapters)
        salt = sha256(json.dumps([tenant, sharing]).encode()).digest()
        picklable_scope = {name: scope[name] for name in SCOPE_FIELDS if name in scope}
        return cls(picklable_scope, body, tuple(make_keys(pages, salt)), len(pages))


def _drop_accounting(system: Any) -> Any:
    """Return system text, or blocks of it, without the line that changes with each request."""
    if isinstance(system, str):
        return ACCOUNTING_LINE.sub("", system)
    if isinstance(system, list):
        return [_drop_accounting(block) for block in system]
    if isinstance(system, dict) and isinstance(system.get("text"), str):
        return system | {"text": ACCOUNTING_LINE.sub("", system["text"])}
    return system


def parse_prefix_pages(
    body: bytes, adapters: Collection[str] = ()
) -> tuple[str | None, list[bytes]]:
    """Return what else requests must share, and the complete pages of the prompt.

    That is the `cache_salt`, and the model if it is one of `adapters`. An invalid body has no
    pages: the replica rejects it.
    """
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            return None, []
        if "system" in fields:
            fields["system"] = _drop_accounting(fields["system"])
        parts = [fields[name] for name in PROMPT_FIELDS if fields.get(name) is not None]
        text = json.dumps(parts, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return None, []
    pages = [
        text[begin : begin + PAGE_BYTES]
        for begin in range(0, len(text) - PAGE_BYTES + 1, PAGE_BYTES)
    ]
    salt, model = fields.get("cache_salt"), fields.get("model")
    salt = salt if isinstance(salt, str) else None
    if not isinstance(model, str):
        return salt, pages
    names = (name for name in (model, model.removesuffix(OLLAMA_TAG)) if name in adapters)
    name = next(names, None)
    return salt if name is None else json.dumps([salt, name]), pages
