"""Store blobs in a Redis or Valkey server, or in a bucket of an object store.

In Redis, a page is a hash `kvant:<page>`, and its fields are parts. A page expires `ttl`
seconds after its last use; before that, the server evicts by its `maxmemory-policy`.

In an object store (S3, Google's, Azure's, or memory), a blob is an object `<prefix>/<page>/<part>`.
obstore reads credentials from the environment alone. kvant does not expire blobs: set a lifecycle
rule of the bucket.

Timeouts are short, so that a dead server costs little.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvant.errors import StoreError
from kvant.stores.contract import (
    Bytes,
    check_blob_size,
    check_page_name,
    check_part_name,
    filter_part_names,
    redact_url,
)

REDIS_SCHEMES = ("redis", "rediss", "unix", "valkey")
REDIS_HELP = "redis://[user:password@]host[:port][/db][?ttl=seconds], or unix:///socket[?db=0]"
DEFAULT_TTL_S = 7 * 86_400
REDIS_TIMEOUTS_S = {"socket_connect_timeout": 1.0, "socket_timeout": 5.0}

OBJECT_STORE_SCHEMES = ("s3", "gs", "az", "memory")
OBJECT_STORE_HELP = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix and memory://"
OBJECT_STORE_URL = re.compile(r"(s3|gs|az)://[\w.-]+(/[^?#@]*)?|memory:///?", re.ASCII)
OBJECT_STORE_TIMEOUTS = {"connect_timeout": "2s", "timeout": "10s"}
RETRY_CONFIG = {"max_retries": 1, "retry_timeout": timedelta(seconds=10)}
MAX_LIST_THREADS = 16  # of one `has`; each thread lists one page at a time


@contextmanager
def _explain_missing(url: str, package: str, extra: str) -> Iterator[None]:
    """Turn a failed import of a client into a StoreError that names its package."""
    try:
        yield
    except ImportError as error:
        message = f"{redact_url(url)}: {package} is needed: pip install 'kvant[{extra}]'"
        raise StoreError(message) from error


class RedisStore:
    """A store of blobs in the hashes of a server."""

    def __init__(self, url: str) -> None:
        """`redis://host`, `rediss://host` with TLS, `unix:///socket`; with `?ttl=3600`."""
        with _explain_missing(url, "redis-py", "redis"):
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        address, numbers = _parse_redis_url(url)
        self.url = redact_url(url)
        self.ttl = numbers.pop("ttl", DEFAULT_TTL_S)
        # Any: redis-py types most commands as possibly awaitable
        self._client: Any = redis.Redis.from_url(
            address,
            **numbers,
            **REDIS_TIMEOUTS_S,
            retry=Retry(NoBackoff(), 0),
        )

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        pipeline = self._client.pipeline(transaction=False)
        for page in pages:
            pipeline.hkeys(_redis_key(page))
        replies = map(_check_reply, pipeline.execute(raise_on_error=False))
        # A foreign name may be no UTF-8.
        return [
            filter_part_names(name.decode(errors="replace") for name in names or ())
            for names in replies
        ]

    def get(self, page: str, part: str) -> Bytes | None:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hget(_redis_key(page), check_part_name(part)).expire(_redis_key(page), self.ttl)
        blob: bytes | None = _check_reply(pipeline.execute(raise_on_error=False)[0])
        return blob

    def put(self, page: str, part: str, blob: Bytes) -> None:
        if self._put(page, part, blob) is None:  # the key is of another program
            self._client.delete(_redis_key(page))
            self._put(page, part, blob)

    def _put(self, page: str, part: str, blob: Bytes) -> Any:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hsetnx(_redis_key(page), check_part_name(part), blob).expire(
            _redis_key(page), self.ttl
        )
        is_new, _ = map(_check_reply, pipeline.execute(raise_on_error=False))
        return is_new

    def drop(self, page: str, part: str) -> None:
        self._client.hdel(_redis_key(page), check_part_name(part))


def _check_reply(reply: Any) -> Any:
    """Return a reply of Redis, None for a key of another program; raise other errors."""
    if not isinstance(reply, Exception):
        return reply
    if str(reply).startswith("WRONGTYPE"):  # a key of this name that is no hash
        return None
    raise reply


def _redis_key(page: str) -> str:
    return f"kvant:{check_page_name(page)}"


def _parse_redis_url(url: str) -> tuple[str, dict[str, int]]:
    """Return the URL for redis-py, and `db` and `ttl` if the URL has them.

    Errors quote no part of a URL that may be a password.
    """
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    scheme = "redis" if scheme == "valkey" else scheme
    error = StoreError(f"{redact_url(url)}: {REDIS_HELP} are allowed")
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


class ObjectStore:
    """A store of blobs in the objects of a bucket."""

    def __init__(self, url: str) -> None:
        """`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `memory://`."""
        with _explain_missing(url, "obstore", "object"):
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
        self.url = redact_url(url)
        if not OBJECT_STORE_URL.fullmatch(url):
            raise StoreError(
                f"{self.url}: {OBJECT_STORE_HELP} are allowed; credentials are read from the "
                "environment"
            )
        self._obstore = obstore
        self._errors = (BaseError, OSError, ValueError)
        self._already_exists = AlreadyExistsError
        options = {} if url.startswith("memory:") else _make_client_options()
        with self._translate_errors():
            self._bucket: Any = obstore.store.from_url(url, **options)
            # The first call starts obstore's threads. Make it here: threads that the background
            # writer starts would inherit its low priority.
            obstore.put(obstore.store.MemoryStore(), "begin", b"")

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        prefixes = [f"{check_page_name(page)}/" for page in pages]
        if len(prefixes) < 2:
            return [self._list_parts(prefix) for prefix in prefixes]
        with ThreadPoolExecutor(min(MAX_LIST_THREADS, len(prefixes)), "kvant-store") as threads:
            return list(threads.map(self._list_parts, prefixes))

    def get(self, page: str, part: str) -> Bytes | None:
        path = _object_path(page, part)
        with self._translate_errors():
            try:
                result = self._obstore.get(self._bucket, path)
            except FileNotFoundError:
                return None
        check_blob_size(result.meta["size"], f"{self.url} {path}")
        with self._translate_errors():
            return bytearray(result.bytes())

    def put(self, page: str, part: str, blob: Bytes) -> None:
        path = _object_path(page, part)
        with self._translate_errors(), suppress(self._already_exists):
            self._obstore.put(self._bucket, path, blob, mode="create", use_multipart=False)

    def drop(self, page: str, part: str) -> None:
        path = _object_path(page, part)
        with self._translate_errors(), suppress(FileNotFoundError):
            self._obstore.delete(self._bucket, path)

    def _list_parts(self, prefix: str) -> frozenset[str]:
        with self._translate_errors():
            objects = self._obstore.list(self._bucket, prefix=prefix).collect()
        return filter_part_names(item["path"].rpartition("/")[2] for item in objects)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise a StoreError with the first line of an error, without queries of signed URLs."""
        try:
            yield
        except self._errors as error:
            line = str(error).partition("\n")[0]
            raise StoreError(re.sub(r"\?[^\s)]*", "", f"{self.url}: {line}")) from None


def _make_client_options() -> dict[str, Any]:
    """Return timeouts and retries; options replace the environment's, so pass AWS_ALLOW_HTTP on."""
    allow_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    client = OBJECT_STORE_TIMEOUTS | {"allow_http": allow_http}
    return {"client_options": client, "retry_config": RETRY_CONFIG}


def _object_path(page: str, part: str) -> str:
    return f"{check_page_name(page)}/{check_part_name(part)}"
