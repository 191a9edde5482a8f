"""API keys: authenticate clients, and map each key to a tenant.

Only hashes of keys stay in memory. The name of a tenant is a digest of its key and the server's
secret; it salts the tenant's prefixes, so tenants share none.
"""

from __future__ import annotations

import hmac
import os
from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from kvant.engine import Stream

UNKNOWN_KEY_MESSAGE = "missing or unknown API key: send Authorization: Bearer KEY"
MIN_KEY_LENGTH = 8  # characters
ADMIN_ROLE = "admin"  # the word before an admin's key
ADMIN_ONLY_MESSAGE = (
    "/metrics has the totals of all tenants and needs an admin key: add a line 'admin KEY' to "
    "--api-keys, or 'admin KEY' to KVANT_API_KEYS; /v1/stats has the counts of your own tenant"
)
KEYS_VARIABLE, SECRET_VARIABLE = "KVANT_API_KEYS", "KVANT_SECRET"  # environment variables


class ApiKeys:
    """Hashes of the accepted keys; without keys, every client is accepted."""

    def __init__(
        self, keys: Iterable[str] = (), secret: str = "", admins: Iterable[str] = ()
    ) -> None:
        """Accept `keys` and `admins`; admins also read the totals of all tenants.

        `secret` is mixed into the names of tenants, so a prefix salt does not reveal a key.
        """
        admin_hashes = [_hash_key(key) for key in admins]
        self._hashes = list(dict.fromkeys([*map(_hash_key, keys), *admin_hashes]))
        self._secret = secret.encode()
        self._admins = frozenset(map(self._make_tenant_name, admin_hashes))

    def __len__(self) -> int:
        return len(self._hashes)

    def authenticate(self, authorization: str) -> str | None:
        """Return the tenant of an Authorization header, None if its key is not accepted."""
        scheme, _, key = authorization.partition(" ")
        return self.find_tenant(key.strip() if scheme.lower() == "bearer" else "")

    def find_tenant(self, key: str) -> str | None:
        """Return the tenant of a key, None if the key is not accepted.

        Compares every hash in constant time, so the duration reveals nothing about a key.
        """
        if not self._hashes:
            return ""
        key_hash, tenant = _hash_key(key), None
        for accepted_hash in self._hashes:
            if hmac.compare_digest(accepted_hash, key_hash):
                tenant = self._make_tenant_name(accepted_hash)
        return tenant

    def is_admin(self, tenant: str) -> bool:
        """Whether a tenant may read the totals of all tenants; without keys, every client may."""
        return not self._hashes or tenant in self._admins

    def _make_tenant_name(self, key_hash: bytes) -> str:
        return hmac.digest(self._secret, key_hash, sha256).hex()


def load_keys(file: Path | None) -> ApiKeys:
    """Load the keys of a file and of KVANT_API_KEYS, with the secret of KVANT_SECRET."""
    keys, admins = parse_keys(file, os.environ.get(KEYS_VARIABLE))
    return ApiKeys(keys, os.environ.get(SECRET_VARIABLE, ""), admins)


def parse_keys(file: Path | None, variable: str | None) -> tuple[list[str], list[str]]:
    """Return all keys and the admins' keys of a file and of an environment variable.

    The file has one entry per line, the variable separates entries by commas. An entry is `KEY`,
    or `admin KEY` for an admin, who is a tenant as well.
    """
    lines = [] if file is None else file.read_text(encoding="utf-8").splitlines()
    entries = [line.strip() for line in lines if not line.lstrip().startswith("#")]
    entries += [entry.strip() for entry in (variable or "").split(",")]
    fields = [entry.split() for entry in entries if entry]
    if file is not None and not fields:
        raise ValueError(f"--api-keys {file}: there is no key in it, one per line is needed")
    for *role, key in fields:
        is_valid_key = len(key) >= MIN_KEY_LENGTH and key.isascii() and key.isprintable()
        if not is_valid_key or role not in ([], [ADMIN_ROLE]):
            raise ValueError(
                f"a key of {len(key)} characters: at least {MIN_KEY_LENGTH} ASCII characters "
                f"without spaces are needed; only the word {ADMIN_ROLE!r} may precede it"
            )
    keys = dict.fromkeys(key for *_, key in fields)
    return [*keys], [*dict.fromkeys(key for *role, key in fields if role)]


def _hash_key(key: str) -> bytes:
    return sha256(key.encode()).digest()


OUTCOMES = ("finished", "cancelled", "failed")
TOKENS = ("prompt_tokens", "cached_tokens", "restored_tokens", "completion_tokens")


class TenantStats:
    """Request and token counts under the names of `Engine.stats()`.

    The counts of all tenants add up to those of the engine.
    """

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()  # counts of ended requests
        self._streams: set[Stream] = set()  # of running requests

    def begin(self, stream: Stream) -> None:
        self._streams.add(stream)

    def end(self, stream: Stream) -> None:
        self._streams.discard(stream)
        self._ended.update(_count_streams([stream]))

    def counts(self) -> dict[str, int]:
        """Counts of ended requests plus those of running ones so far."""
        totals = self._ended + _count_streams(self._streams)
        return {name: totals[name] for name in ("requests", *OUTCOMES, *TOKENS)}


def _count_streams(streams: Iterable[Stream]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for stream in streams:
        usage = stream.usage
        counts["requests"] += 1
        if stream.outcome is not None:
            counts[stream.outcome] += 1
        for name in TOKENS:
            counts[name] += getattr(usage, name)
    return counts
