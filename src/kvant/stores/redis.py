"""Store blobs in a Redis or Valkey server: a page is a hash `kvant:<page>`, its fields are parts.

A page expires after its time to live without use; before that, the server evicts by its
`maxmemory-policy`. Timeouts are short, so that a dead server costs little.
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

DEFAULT_TTL_S = 7 * 86_400
CONNECT_TIMEOUT_S = 1.0
REQUEST_TIMEOUT_S = 5.0
REDIS_SCHEMES = ("redis", "rediss", "unix", "valkey")
URL_HELP = "redis://[user:password@]host[:port][/db][?ttl=seconds], or unix:///socket[?db=0]"


class RedisStore:
    """A store of blobs in the hashes of a server."""

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
        # Any: redis-py types most commands as possibly awaitable
        self._client: Any = redis.Redis.from_url(
            address,
            **numbers,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=REQUEST_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        pipeline = self._client.pipeline(transaction=False)
        for page in pages:
            pipeline.hkeys(_redis_key(page))
        return [filter_part_names(name.decode() for name in names) for names in pipeline.execute()]

    def get(self, page: str, part: str) -> Bytes | None:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hget(_redis_key(page), check_part_name(part)).expire(_redis_key(page), self.ttl)
        blob: bytes | None = pipeline.execute()[0]
        return blob

    def put(self, page: str, part: str, blob: Bytes) -> None:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hsetnx(_redis_key(page), check_part_name(part), blob).expire(
            _redis_key(page), self.ttl
        )
        pipeline.execute()

    def drop(self, page: str, part: str) -> None:
        self._client.hdel(_redis_key(page), check_part_name(part))


def _redis_key(page: str) -> str:
    return f"kvant:{check_page_name(page)}"


def _parse_url(url: str) -> tuple[str, dict[str, int]]:
    """Return the URL for redis-py, and the numbers of the query.

    Errors quote no part of a URL that may be a password.
    """
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    scheme = "redis" if scheme == "valkey" else scheme
    error = StoreError(f"{redact_url(url)}: {URL_HELP} are allowed")
    try:
        options = parse_qs(query, strict_parsing=True) if query else {}
        numbers = {name: int(value) for name, (value,) in options.items()}
        split = urlsplit(f"{scheme}://{address}")
        if scheme == "unix":
            is_address = bool(split.path) and not split.hostname
        else:
            is_address = bool(split.hostname) and split.port != 0 and "db" not in numbers
            numbers |= {"db": int(split.path[1:])} if split.path[1:] else {}
            address = split.netloc
    except ValueError:
        raise error from None
    is_known = numbers.keys() <= {"db", "ttl"} and not split.fragment
    is_valid = numbers.get("db", 0) >= 0 and numbers.get("ttl", DEFAULT_TTL_S) > 0
    if not (is_address and is_known and is_valid):
        raise error
    return f"{scheme}://{address}", numbers
