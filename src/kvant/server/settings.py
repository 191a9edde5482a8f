"""Server configuration: the model, the format of its cache, the limits, and the API keys.

Each key is a tenant. Only hashes of keys stay in memory. The name of a tenant is a digest of its
key and the server's secret; it salts the tenant's prefixes, so tenants share none.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvant import checkpoints
from kvant.adapters import check_adapters
from kvant.attention import check_backend
from kvant.errors import SpecError
from kvant.generation.settings import check_draft, load_draft
from kvant.platform.devices import parse_device, parse_dtype
from kvant.platform.sizes import parse_size
from kvant.recipes import RAW_WEIGHTS
from kvant.server.protocol import OLLAMA_TAG
from kvant.spec import parse_words
from kvant.spec.language import check_spec_or_auto, is_auto
from kvant.stores import open_tiers

BUNDLED_MODEL_NAME = "kvant-inside"
DEFAULT_PREFIX_BYTES = "1GiB"  # of prefixes, if max_bytes does not bound all caches
UNKNOWN_KEY_MESSAGE = (
    "missing or unknown API key: send Authorization: Bearer KEY, or x-api-key: KEY"
)
MIN_KEY_LENGTH = 8  # characters
ADMIN_ROLE = "admin"  # the word before an admin's key
ADMIN_ONLY_MESSAGE = (
    "/metrics has the totals of all tenants and needs an admin key: add a line 'admin KEY' to "
    "--api-keys, or 'admin KEY' to KVANT_API_KEYS; /v1/stats has the counts of your own tenant"
)
KEYS_VARIABLE, SECRET_VARIABLE = "KVANT_API_KEYS", "KVANT_SECRET"  # environment variables


def _as_list(value: Any) -> Any:
    """Wrap a single store's name in a list."""
    return [value] if isinstance(value, str) else value


def check_model_names(names: Sequence[str]) -> None:
    """Raise ValueError if two models have one name, with or without Ollama's tag."""
    plain_names = [name.removesuffix(OLLAMA_TAG) for name in names]
    for name, plain_name in zip(names, plain_names, strict=True):
        if plain_names.count(plain_name) > 1:
            raise ValueError(f"two models are called {name}: give each adapter a name of its own")


class ServerSettings(BaseModel):
    """The options of `kvant serve` that configure a service, under the same names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    name: str | None = None
    trust_remote_code: bool = False
    kv_cache: str = "affine8"
    max_bytes: str | None = None
    max_sequences: int = Field(default=16, ge=1)
    max_context: int | None = Field(default=None, ge=2)
    max_new_tokens: int = Field(default=1024, ge=1)
    max_waiting: int = Field(default=256, ge=0)
    chunk_seconds: float | None = None
    store: Annotated[list[str], BeforeValidator(_as_list)] = []
    backend: str | None = None
    pack: bool = True
    weights: str | None = None
    guard: bool = True
    draft: str | None = None  # "ngram", or the name of a smaller model
    adapters: dict[str, str] = {}  # folders of PEFT, by name of the model for clients
    device: str | None = None
    dtype: str = "auto"

    @property
    def served_model_name(self) -> str:
        """Model name for clients."""
        return self.name or (Path(self.model).name if self.model else BUNDLED_MODEL_NAME)

    def check(self) -> None:
        """Raise an error for invalid settings, before anything is loaded."""
        if self.max_bytes is not None:
            parse_size(self.max_bytes)
        check_spec_or_auto(self.kv_cache)
        check_backend(self.backend)
        parse_device(self.device)
        parse_dtype(self.dtype)
        checkpoints.check_checkpoint(self.model)
        check_draft(self.draft)
        if self.store and not self.shares_prefixes:
            raise SpecError(
                f"--store with --kv-cache {self.kv_cache}: a row pruned for one prompt may matter "
                "to the next, so prompts share no prefixes; drop --store or prune="
            )
        if self.store:
            open_tiers(self.store)
        check_model_names([self.served_model_name, *self.adapters])
        check_adapters(self.adapters)

    def load(self) -> tuple[Any, Any]:
        """Load the model and its tokenizer."""
        return checkpoints.load(self.model, **self._load_options)

    def load_processor(self, model: Any, tokenizer: Any) -> Any:
        """Return the processor of the loaded model if it reads images, else its tokenizer."""
        trust_code = self._load_options["trust_code"]
        return checkpoints.load_processor(self.model, model, tokenizer, trust_code=trust_code)

    def load_draft(self) -> Any:
        """Return the method of drafts, or load the draft model."""
        return load_draft(self.draft, pack=self.pack, **self._load_options)

    @property
    def _load_options(self) -> dict[str, Any]:
        return {
            "trust_code": self.trust_remote_code,
            "device": self.device,
            "dtype": self.dtype,
            "weights": self.weights or (RAW_WEIGHTS if self.pack else None),
        }

    @property
    def max_prefix_bytes(self) -> str | None:
        """Limit on the bytes of prefixes; None if `max_bytes` bounds them with all caches."""
        return DEFAULT_PREFIX_BYTES if self.max_bytes is None else None

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts share prefixes: not if rows are pruned, which another may need."""
        return is_auto(self.kv_cache) or "prune" not in parse_words(self.kv_cache).options


def read_authorization(headers: Mapping[str, str]) -> str:
    """Return the Authorization header, or x-api-key in its form, as Anthropic's clients send it."""
    return headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"


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
        key_hash = _hash_key(key)
        matches = [accepted for accepted in self._hashes if hmac.compare_digest(accepted, key_hash)]
        return self._make_tenant_name(key_hash) if matches else None

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
