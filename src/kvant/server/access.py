"""Who may ask: keys, of which only hashes are kept, and what keeps their owners apart."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

UNKNOWN_KEY_MESSAGE = "no key, or one that is not known: Authorization: Bearer KEY"
MIN_KEY_LENGTH = 8  # characters of a key
ADMIN = "admin"  # stands before a key that reads the totals of all tenants
FOR_ADMINS = (
    "/metrics has the totals of all tenants, for an admin key: a line 'admin KEY' of --api-keys, "
    "or 'admin KEY' in KVANT_API_KEYS, makes one; /v1/stats has your own figures"
)
KEYS_VARIABLE, SECRET_VARIABLE = "KVANT_API_KEYS", "KVANT_SECRET"  # in the environment


class ApiKeys:
    """The hashes of keys; none: everybody may ask."""

    def __init__(
        self, keys: Iterable[str] = (), secret: str = "", admins: Iterable[str] = ()
    ) -> None:
        """What a tenant's prefixes are salted with follows from its key and the server's secret.

        `admins` are keys as well, and read the totals of all tenants.
        """
        admin = [_hash_key(key) for key in admins]
        self._hashes = list(dict.fromkeys([*map(_hash_key, keys), *admin]))
        self._secret = secret.encode()
        self._admins = frozenset(map(self._name, admin))

    def __len__(self) -> int:
        return len(self._hashes)

    def authenticate(self, authorization: str) -> str | None:
        """The tenant of a request with this header; None: of nobody."""
        kind, _, key = authorization.partition(" ")
        return self.find_tenant(key.strip() if kind.lower() == "bearer" else "")

    def find_tenant(self, key: str) -> str | None:
        """The name under which the owner of a key is known; None: it is no key of ours.

        All are compared, whichever it is, each in a time that tells nothing.
        """
        if not self._hashes:
            return ""
        asked, found = _hash_key(key), None
        for one in self._hashes:
            if hmac.compare_digest(one, asked):
                found = self._name(one)
        return found

    def is_admin(self, tenant: str) -> bool:
        """Whether a tenant reads the totals of all; without keys, every client does."""
        return not self._hashes or tenant in self._admins

    def _name(self, hashed: bytes) -> str:
        return hmac.digest(self._secret, hashed, sha256).hex()


def load_keys(file: Path | None) -> ApiKeys:
    """The keys of a file and of the environment."""
    keys, admins = parse_keys(file, os.environ.get(KEYS_VARIABLE))
    return ApiKeys(keys, os.environ.get(SECRET_VARIABLE, ""), admins)


def parse_keys(file: Path | None, variable: str | None) -> tuple[list[str], list[str]]:
    """Read the keys of a file, one a line, and of a variable, between commas; and the admins' keys.

    `admin KEY` is the key of an admin, which is a tenant as well.
    """
    lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()
    told = [line.strip() for line in lines if not line.lstrip().startswith("#")]
    told += [one.strip() for one in (variable or "").split(",")]
    words = [one.split() for one in told if one]
    if file is not None and not words:
        raise ValueError(f"--api-keys {file}: there is no key in it, one a line is needed")
    for *role, key in words:
        right = len(key) >= MIN_KEY_LENGTH and key.isascii() and key.isprintable()
        if not right or role not in ([], [ADMIN]):
            raise ValueError(
                f"a key of {len(key)} characters: {MIN_KEY_LENGTH} or more are needed, in ASCII "
                "without "
                f"spaces; only the word {ADMIN!r} and a space may stand before it"
            )
    keys = dict.fromkeys(key for *_, key in words)
    return [*keys], [*dict.fromkeys(key for *role, key in words if role)]


def _hash_key(key: str) -> bytes:
    return sha256(key.encode()).digest()
