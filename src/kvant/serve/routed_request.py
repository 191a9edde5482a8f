"""A request on its way to one of several replicas, with the names of what it begins with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from kvant.serve.routing import make_keys

PAGE_BYTES = 256  # bytes of what a request says: about 64 tokens
PROMPT_FIELDS = ("instructions", "tools", "messages", "input", "prompt")  # in the order of a prompt
SCOPE_FIELDS = (  # of what ASGI says of a request, all that an application asks
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


@dataclass(frozen=True)
class RoutedRequest:
    """One request, whole."""

    scope: dict[str, Any]
    body: bytes
    page_keys: tuple[bytes, ...]  # of its first pages, for who shares prefixes with it
    num_pages: int

    @classmethod
    def from_scope(cls, scope: Mapping[str, Any], body: bytes, tenant: str) -> RoutedRequest:
        """What ASGI says of it, its body, and whose key it has."""
        own, pages = parse_prefix_pages(body)
        salt = sha256(json.dumps([tenant, own]).encode()).digest()
        told = {name: scope[name] for name in SCOPE_FIELDS if name in scope}
        return cls(told, body, tuple(make_keys(pages, salt)), len(pages))


def parse_prefix_pages(body: bytes) -> tuple[str | None, list[bytes]]:
    """With whom a request shares prefixes, and what it begins with in whole pages.

    There are none where nobody can tell: a replica says what is wrong with it.
    """
    try:
        told = json.loads(body)
        if not isinstance(told, dict):
            return None, []
        parts = [told[name] for name in PROMPT_FIELDS if told.get(name) is not None]
        text = json.dumps(parts, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return None, []
    pages = [
        text[begin : begin + PAGE_BYTES]
        for begin in range(0, len(text) - PAGE_BYTES + 1, PAGE_BYTES)
    ]
    salt = told.get("cache_salt")
    return salt if isinstance(salt, str) else None, pages
