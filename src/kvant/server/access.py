"""Who may ask: keys, of which only hashes are kept, and what keeps their owners apart."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

UNKNOWN = "no key, or one that is not known: Authorization: Bearer KEY"
SHORTEST = 8  # characters of a key
KEYS, SECRET = "KVANT_API_KEYS", "KVANT_SECRET"  # in the environment


class Keys:
    """The hashes of keys; none: everybody may ask."""

    def __init__(self, keys: Iterable[str] = (), secret: str = "") -> None:
        """What a tenant's prefixes are salted with follows from its key and the server's secret."""
        self._hashes = [_hashed(key) for key in keys]
        self._secret = secret.encode()

    def __len__(self) -> int:
        return len(self._hashes)

    def asking(self, authorization: str) -> str | None:
        """The tenant of a request with this header; None: of nobody."""
        kind, _, key = authorization.partition(" ")
        return self.tenant(key.strip() if kind.lower() == "bearer" else "")

    def tenant(self, key: str) -> str | None:
        """The name under which the owner of a key is known; None: it is no key of ours.

        All are compared, whichever it is, each in a time that tells nothing.
        """
        if not self._hashes:
            return ""
        asked, found = _hashed(key), None
        for one in self._hashes:
            if hmac.compare_digest(one, asked):
                found = hmac.digest(self._secret, one, sha256).hex()
        return found


def known(file: Path | None) -> Keys:
    """The keys of a file and of the environment."""
    return Keys(keys_in(file, os.environ.get(KEYS)), os.environ.get(SECRET, ""))


def keys_in(file: Path | None, named: str | None) -> list[str]:
    """Those of a file, one a line, and of a variable, between commas."""
    lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()
    told = [line.strip() for line in lines if not line.lstrip().startswith("#")]
    told += [one.strip() for one in (named or "").split(",")]
    keys = list(dict.fromkeys(key for key in told if key))
    if file is not None and not keys:
        raise ValueError(f"--api-keys {file}: there is no key in it, one a line is needed")
    for key in keys:
        if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(
                f"a key of {len(key)} characters: {SHORTEST} or more are needed, in ASCII without "
                "spaces"
            )
    return keys


def _hashed(key: str) -> bytes:
    return sha256(key.encode()).digest()
