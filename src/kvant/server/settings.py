"""Server configuration: the model, the format of its cache, and the limits of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvant import checkpoints
from kvant.attention import check_backend
from kvant.engine import Engine
from kvant.errors import SpecError
from kvant.platform import malloc
from kvant.platform.devices import parse_device, parse_dtype
from kvant.platform.sizes import parse_size
from kvant.prefixes import Prefixes
from kvant.recipes import AnySpec
from kvant.server.access import ApiKeys
from kvant.server.service import Service
from kvant.spec import as_spec
from kvant.spec.auto import check_spec_or_auto, is_auto
from kvant.stores import open_tiers

BUNDLED_MODEL_NAME = "kvant-inside"
DEFAULT_PREFIX_BYTES = "1GiB"  # of prefixes, if max_bytes does not bound all caches


def _as_list(value: Any) -> Any:
    """Wrap a single store's name in a list."""
    return [value] if isinstance(value, str) else value


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
    guard: bool = True
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
        if self.store and not self.shares_prefixes:
            raise SpecError(
                f"--store with --kv-cache {self.kv_cache}: a row pruned for one prompt may matter "
                "to the next, so prompts share no prefixes; drop --store or prune="
            )
        if self.store:
            open_tiers(self.store)

    def load(self) -> tuple[Any, Any]:
        """Load the model and its tokenizer."""
        return checkpoints.load(
            self.model, trust_code=self.trust_remote_code, device=self.device, dtype=self.dtype
        )

    @property
    def max_prefix_bytes(self) -> str | None:
        """Limit on the bytes of prefixes; None if `max_bytes` bounds them with all caches."""
        return DEFAULT_PREFIX_BYTES if self.max_bytes is None else None

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts share prefixes: not if rows are pruned, which another may need."""
        return is_auto(self.kv_cache) or not as_spec(self.kv_cache, 1).prunes

    @contextmanager
    def open_service(
        self, model: Any, tokenizer: Any, spec: AnySpec, prefixes: Prefixes | None, keys: ApiKeys
    ) -> Iterator[Service]:
        """Open an engine and yield its service; close the engine at the end."""
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
