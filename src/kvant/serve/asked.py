"""A request on its way to one of several replicas, with the names of what it begins with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from kvant.serve.routing import keys

PAGE = 256  # bytes of what a request says: about 64 tokens
SAID = ("instructions", "tools", "messages", "input", "prompt")  # in the order of a prompt
SCOPE = (  # of what ASGI says of a request, all that an application asks
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


@dataclass(frozen=True)
class Asked:
    """One request, whole."""

    scope: dict[str, Any]
    body: bytes
    keys: tuple[bytes, ...]  # of its first pages, for who shares prefixes with it
    pages: int

    @classmethod
    def of(cls, scope: Mapping[str, Any], body: bytes, tenant: str) -> Asked:
        """What ASGI says of it, its body, and whose key it has."""
        own, pages = begins(body)
        salt = sha256(json.dumps([tenant, own]).encode()).digest()
        told = {name: scope[name] for name in SCOPE if name in scope}
        return cls(told, body, tuple(keys(pages, salt)), len(pages))


def begins(body: bytes) -> tuple[str | None, list[bytes]]:
    """With whom a request shares prefixes, and what it begins with in whole pages.

    There are none where nobody can tell: a replica says what is wrong with it.
    """
    try:
        told = json.loads(body)
        if not isinstance(told, dict):
            return None, []
        parts = [told[name] for name in SAID if told.get(name) is not None]
        text = json.dumps(parts, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return None, []
    pages = [text[begin : begin + PAGE] for begin in range(0, len(text) - PAGE + 1, PAGE)]
    salt = told.get("cache_salt")
    return salt if isinstance(salt, str) else None, pages
