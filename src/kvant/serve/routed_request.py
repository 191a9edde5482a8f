"""Requests on their way from the front to a replica, with the keys of their first pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from kvant.serve.routing import make_keys

PAGE_BYTES = 256  # of the request's JSON: about 64 tokens
PROMPT_FIELDS = ("instructions", "tools", "messages", "input", "prompt")  # in the order of a prompt
SCOPE_FIELDS = (  # the fields of an ASGI scope that applications use, all of which pickle
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


@dataclass(frozen=True)
class RoutedRequest:
    """One complete request."""

    scope: dict[str, Any]
    body: bytes
    page_keys: tuple[bytes, ...]  # of its first pages; equal for requests that share a prefix
    num_pages: int

    @classmethod
    def from_scope(cls, scope: Mapping[str, Any], body: bytes, tenant: str) -> RoutedRequest:
        """Make a routed request from an ASGI scope, a body and the tenant of its key."""
        cache_salt, pages = parse_prefix_pages(body)
        salt = sha256(json.dumps([tenant, cache_salt]).encode()).digest()
        picklable_scope = {name: scope[name] for name in SCOPE_FIELDS if name in scope}
        return cls(picklable_scope, body, tuple(make_keys(pages, salt)), len(pages))


def parse_prefix_pages(body: bytes) -> tuple[str | None, list[bytes]]:
    """Return the `cache_salt` of a request and the complete pages of its prompt.

    An invalid body has no pages: the replica rejects it.
    """
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            return None, []
        parts = [fields[name] for name in PROMPT_FIELDS if fields.get(name) is not None]
        text = json.dumps(parts, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return None, []
    pages = [
        text[begin : begin + PAGE_BYTES]
        for begin in range(0, len(text) - PAGE_BYTES + 1, PAGE_BYTES)
    ]
    salt = fields.get("cache_salt")
    return salt if isinstance(salt, str) else None, pages
