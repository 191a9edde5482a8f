"""Store blobs in an object store: S3, Google's, Azure's, or memory, as `<prefix>/<page>/<part>`.

Credentials are read by obstore, from the environment alone. Old blobs are deleted by a lifecycle
rule of the bucket.
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
    check_blob_size,
    check_page_name,
    check_part_name,
    filter_part_names,
    redact_url,
)

OBJECT_STORE_SCHEMES = ("s3", "gs", "az", "memory")
URL_PATTERN = re.compile(r"(s3|gs|az)://[\w.-]+(/[^?#@]*)?|memory:///?", re.ASCII)
URL_HELP = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix and memory://"
CONNECT_TIMEOUT = "2s"
REQUEST_TIMEOUT = "10s"
RETRY_CONFIG = {"max_retries": 1, "retry_timeout": timedelta(seconds=10)}
MAX_LIST_THREADS = 16  # each lists a page


class ObjectStore:
    """A store of blobs in the objects of a bucket."""

    def __init__(self, url: str) -> None:
        """`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `memory://`."""
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
        except ImportError as error:
            raise StoreError(
                f"{redact_url(url)}: obstore is needed: pip install 'kvant[object]'"
            ) from error
        self.url = redact_url(url)
        if not URL_PATTERN.fullmatch(url):
            raise StoreError(
                f"{self.url}: {URL_HELP} are allowed; credentials are read from the environment"
            )
        self._obstore = obstore
        self._errors = (BaseError, OSError, ValueError)
        self._already_exists = AlreadyExistsError
        options = {} if url.startswith("memory:") else _make_client_options()
        with self._translate_errors():
            self._bucket: Any = obstore.store.from_url(url, **options)
            # The first call starts obstore's threads. Later, they would start in the background
            # writer and inherit its low priority.
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
    """Return timeouts and retries, which replace those of the environment."""
    allow_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    client = {
        "connect_timeout": CONNECT_TIMEOUT,
        "timeout": REQUEST_TIMEOUT,
        "allow_http": allow_http,
    }
    return {"client_options": client, "retry_config": RETRY_CONFIG}


def _object_path(page: str, part: str) -> str:
    return f"{check_page_name(page)}/{check_part_name(part)}"
