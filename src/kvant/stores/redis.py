"""A Redis or a Valkey as a store: a page is a hash `kvant:<page>`, whose fields are its parts.

A page that nobody uses goes after its time to live; before that, the server forgets as its
`maxmemory-policy` says. Answers are waited for so briefly that a dead server costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvant.errors import StoreError
from kvant.stores.contract import (
    Bytes,
    check_page_name,
    check_part_name,
    filter_part_names,
    redact_url,
)

DEFAULT_TTL_S = 7 * 86_400  # seconds
CONNECT_TIMEOUT_S = 1.0  # seconds, at most
REQUEST_TIMEOUT_S = 5.0
SCHEMES = ("redis", "rediss", "unix", "valkey")
URL_HELP = "redis://[user:password@]host[:port][/db][?ttl=seconds], or unix:///socket[?db=0]"


class RedisStore:
    """Blobs in the hashes of a server."""

    def __init__(self, url: str) -> None:
        """`redis://host`, `rediss://host` with TLS, `unix:///socket`; with `?ttl=3600`."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise StoreError(
                f"{redact_url(url)}: redis-py is needed: pip install 'kvant[redis]'"
            ) from error
        address, numbers = _parse_url(url)
        self.url = redact_url(url)
        self.ttl = numbers.pop("ttl", DEFAULT_TTL_S)
        # Any: redis-py says of most commands that they may have to be awaited
        self._client: Any = redis.Redis.from_url(
            address,
            **numbers,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=REQUEST_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        asked = self._client.pipeline(transaction=False)
        for page in pages:
            asked.hkeys(_redis_key(page))
        return [filter_part_names(name.decode() for name in names) for names in asked.execute()]

    def get(self, page: str, part: str) -> Bytes | None:
        asked = self._client.pipeline(transaction=False)
        asked.hget(_redis_key(page), check_part_name(part)).expire(_redis_key(page), self.ttl)
        blob: bytes | None = asked.execute()[0]
        return blob

    def put(self, page: str, part: str, blob: Bytes) -> None:
        asked = self._client.pipeline(transaction=False)
        asked.hsetnx(_redis_key(page), check_part_name(part), blob).expire(
            _redis_key(page), self.ttl
        )
        asked.execute()

    def drop(self, page: str, part: str) -> None:
        self._client.hdel(_redis_key(page), check_part_name(part))


def _redis_key(page: str) -> str:
    return f"kvant:{check_page_name(page)}"


def _parse_url(url: str) -> tuple[str, dict[str, int]]:
    """What redis-py connects to, and the numbers behind the `?`.

    No word of a URL gets into an error: it may be a password.
    """
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    scheme = "redis" if scheme == "valkey" else scheme
    wrong = StoreError(f"{redact_url(url)}: {URL_HELP} are allowed")
    try:
        told = parse_qs(query, strict_parsing=True) if query else {}
        numbers = {name: int(value) for name, (value,) in told.items()}
        split = urlsplit(f"{scheme}://{address}")
        if scheme == "unix":
            right = bool(split.path) and not split.hostname
        else:
            right = bool(split.hostname) and split.port != 0 and "db" not in numbers
            numbers |= {"db": int(split.path[1:])} if split.path[1:] else {}
            address = split.netloc
    except ValueError:
        raise wrong from None
    known = numbers.keys() <= {"db", "ttl"} and not split.fragment
    if not (
        right and known and numbers.get("db", 0) >= 0 and numbers.get("ttl", DEFAULT_TTL_S) > 0
    ):
        raise wrong
    return f"{scheme}://{address}", numbers
