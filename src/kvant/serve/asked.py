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
    keys: tuple[bytes, ...]  # of its first pages, for who has the same key as it
    pages: int

    @classmethod
    def of(cls, scope: Mapping[str, Any], body: bytes) -> Asked:
        """What ASGI says of it, and its body."""
        pages = pages_of(body)
        who = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        told = {name: scope[name] for name in SCOPE if name in scope}
        return cls(told, body, tuple(keys(pages, sha256(who).digest())), len(pages))


def pages_of(body: bytes) -> list[bytes]:
    """What a request begins with, in whole pages; none where nobody can tell."""
    try:
        told = json.loads(body)
    except ValueError:
        return []
    if not isinstance(told, dict):
        return []
    parts = [told[name] for name in SAID if told.get(name) is not None]
    text = json.dumps(parts, separators=(",", ":")).encode()
    return [text[begin : begin + PAGE] for begin in range(0, len(text) - PAGE + 1, PAGE)]
