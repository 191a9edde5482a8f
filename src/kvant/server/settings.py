"""What a server is of: a model, how its cache is stored, and within which limits it answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvant import checkpoints, malloc
from kvant.attention import check_backend
from kvant.devices import parse_device, parse_dtype
from kvant.engine import Engine
from kvant.errors import SpecError
from kvant.prefixes import Prefixes
from kvant.server.access import ApiKeys
from kvant.server.service import Service
from kvant.sizes import parse_size
from kvant.spec import as_spec
from kvant.spec.auto import check_spec_or_auto, is_auto
from kvant.stores import open_tiers

BUNDLED_MODEL_NAME = "kvant-inside"  # the name of the model inside the package
DEFAULT_PREFIX_BYTES = "1GiB"  # of prefixes, where nothing bounds all caches


def _as_list(value: Any) -> Any:
    """One of them needs no list."""
    return [value] if isinstance(value, str) else value


class ServerSettings(BaseModel):
    """The options of `kvant serve` that a service is made by, under their names."""

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
    guard: bool = True
    device: str | None = None
    dtype: str = "auto"

    @property
    def served_model_name(self) -> str:
        """What clients call the model."""
        return self.name or (Path(self.model).name if self.model else BUNDLED_MODEL_NAME)

    def check(self) -> None:
        """Before anything is loaded: what is wrong, as far as it can be known."""
        if self.max_bytes is not None:
            parse_size(self.max_bytes)
        check_spec_or_auto(self.kv_cache)
        check_backend(self.backend)
        parse_device(self.device)
        parse_dtype(self.dtype)
        checkpoints.check_checkpoint(self.model)
        if self.store and not self.shares_prefixes:
            raise SpecError(
                f"a store beside {self.kv_cache}: rows that one prompt leaves out may matter to the"
                " next, so nothing is shared; leave one of the two out"
            )
        if self.store:
            open_tiers(self.store)

    def load(self) -> tuple[Any, Any]:
        """The model, and its tokenizer."""
        return checkpoints.load(
            self.model, trust_code=self.trust_remote_code, device=self.device, dtype=self.dtype
        )

    @property
    def max_prefix_bytes(self) -> str | None:
        """The bytes of prefixes; None: the limit of all caches is theirs as well."""
        return DEFAULT_PREFIX_BYTES if self.max_bytes is None else None

    @property
    def shares_prefixes(self) -> bool:
        """Do prompts share what they begin with? Rows that one leaves out may matter to others."""
        return is_auto(self.kv_cache) or not as_spec(self.kv_cache, 1).prunes

    @contextmanager
    def open_service(
        self, model: Any, tokenizer: Any, spec: Any, prefixes: Prefixes | None, keys: ApiKeys
    ) -> Iterator[Service]:
        """The service, for as long as its engine is open."""
        malloc.keep_freed_memory()
        with Engine(
            model,
            tokenizer,
            spec,
            prefixes=prefixes
            or (Prefixes(self.max_prefix_bytes) if self.shares_prefixes else None),
            max_bytes=self.max_bytes,
            max_sequences=self.max_sequences,
            max_context=self.max_context,
            chunk_seconds=self.chunk_seconds,
            backend=self.backend,
            pack=self.pack,
        ) as engine:
            yield Service(
                engine,
                self.served_model_name,
                keys,
                max_waiting=self.max_waiting,
                max_new_tokens=self.max_new_tokens,
            )
