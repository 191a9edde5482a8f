"""An object store as a store: S3, Google's, Azure's, or memory; a blob is `<prefix>/<page>/<part>`.

Who may read and write there is said by the environment alone, as obstore reads it. What was not
used for long is deleted by a lifecycle rule of the bucket.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from kvant.errors import StoreError
from kvant.stores.contract import (
    Bytes,
    checked_page,
    checked_part,
    checked_size,
    named,
    parts_among,
)

SCHEMES = ("s3", "gs", "az", "memory")
URL = re.compile(r"(s3|gs|az)://[\w.-]+(/[^?#@]*)?|memory:///?", re.ASCII)
ALLOWED = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix and memory://"
CONNECT = "2s"
ANSWER = "10s"
RETRIES = {"max_retries": 1, "retry_timeout": timedelta(seconds=10)}
AT_ONCE = 16  # pages that are listed


class Objects:
    """Blobs in the objects of a bucket."""

    def __init__(self, url: str) -> None:
        """`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `memory://`."""
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
        except ImportError as error:
            raise StoreError(
                f"{named(url)}: obstore is needed: pip install 'kvant[object]'"
            ) from error
        self.url = named(url)
        if not URL.fullmatch(url):
            raise StoreError(
                f"{self.url}: {ALLOWED} are allowed; the environment says who may go there"
            )
        self._calls = obstore
        self._failed = (BaseError, OSError, ValueError)
        self._exists = AlreadyExistsError
        options = {} if url.startswith("memory:") else _options()
        with self._told():
            self._bucket: Any = obstore.store.from_url(url, **options)
            # its threads begin with the first call, and not as late as in a thread that writes
            # behind, whose priority they would have
            obstore.put(obstore.store.MemoryStore(), "begin", b"")

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        prefixes = [f"{checked_page(page)}/" for page in pages]
        if len(prefixes) < 2:
            return [self._parts(one) for one in prefixes]
        with ThreadPoolExecutor(min(AT_ONCE, len(prefixes)), "kvant-store") as threads:
            return list(threads.map(self._parts, prefixes))

    def get(self, page: str, part: str) -> Bytes | None:
        path = _path(page, part)
        with self._told():
            try:
                found = self._calls.get(self._bucket, path)
            except FileNotFoundError:
                return None
        checked_size(found.meta["size"], f"{self.url} {path}")
        with self._told():
            return bytearray(found.bytes())

    def put(self, page: str, part: str, blob: Bytes) -> None:
        path = _path(page, part)
        with self._told(), suppress(self._exists):
            self._calls.put(self._bucket, path, blob, mode="create", use_multipart=False)

    def drop(self, page: str, part: str) -> None:
        path = _path(page, part)
        with self._told(), suppress(FileNotFoundError):
            self._calls.delete(self._bucket, path)

    def _parts(self, prefix: str) -> frozenset[str]:
        with self._told():
            found = self._calls.list(self._bucket, prefix=prefix).collect()
        return parts_among(one["path"].rpartition("/")[2] for one in found)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """One line of an error, without what a signed URL in it has behind its `?`."""
        try:
            yield
        except self._failed as error:
            told = str(error).partition("\n")[0]
            raise StoreError(re.sub(r"\?[^\s)]*", "", f"{self.url}: {told}")) from None


def _options() -> dict[str, Any]:
    """How long an answer is waited for. These replace what the environment says of connections."""
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    client = {"connect_timeout": CONNECT, "timeout": ANSWER, "allow_http": plain}
    return {"client_options": client, "retry_config": RETRIES}


def _path(page: str, part: str) -> str:
    return f"{checked_page(page)}/{checked_part(part)}"
