"""Cache prefixes for any number of models, specs, sessions and engines within one limit of bytes.

`Prefixes` is what users hold. Its `PrefixMemory` has the cached sequences of all models, and its
`PrefixStore` writes and reads them. A `PrefixNamespace` is the view of one reader on both, with one
model, spec and salt. It has no reference to `Prefixes`. A prefix moves between requests, memory and
stores:

         cache of a request, at a checkpoint or its end      cache of a new request
                  |                                                 ^
                  |  insert: merge                                  |  match: fork, rewind
                  v                                                 |
    memory     entries of a PrefixTree: caches over shared pools ---+---- evict: free
                  |                                ^
                  |  PrefixWrite (background)      |  insert_restored
                  |                                |
                  |                          CachedPrefix
                  |                                ^
                  v                                |  find_hits: StoreHit; restore
    stores     blobs of pages, and of tail states -+
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import finalize

from transformers import PreTrainedModel

from kvant.errors import RenamedAttribute
from kvant.hf import TransformersCache
from kvant.platform.sizes import as_bytes
from kvant.prefixes.memory import PrefixMemory
from kvant.prefixes.namespace import PrefixNamespace
from kvant.prefixes.prefix_store import PrefixStore
from kvant.recipes import iterate_attention
from kvant.spec import describe_spec
from kvant.stores import Store, Tiers, open_tiers

EXACT_CHUNK = 512  # tokens of a chunk with `exact`; exact prefixes end at multiples of it


class Prefixes:
    """Cached prefixes of prompts within a limit of bytes; for any number of threads.

    >>> prefixes = kvant.Prefixes("64MiB")
    >>> for text in ("import os, sys", "import os, re"):  # with a common prefix
    ...     steps = kvant.generate(model, tokenizer, text, prefixes=prefixes, max_new_tokens=4)
    ...     reply = "".join(step.text for step in steps)
    >>> prefixes.stats()["tokens_hit"] > 0
    True
    """

    # Old names of attributes; reading one warns.
    shelf = RenamedAttribute("open_namespace")
    archive = RenamedAttribute("prefix_store")

    def __init__(
        self,
        max_bytes: int | str | None = "1GiB",
        *,
        salt: str = "",
        exact: bool = False,
        store: str | Store | Sequence[str | Store] | Tiers | None = None,
    ) -> None:
        """`max_bytes` bounds all cached pages and states; None: no limit.

        Prefixes are also written to a `store` and restored from it: a folder, a URL, or a list of
        these, nearest first. Prefixes of another `salt` are not shared. With `exact`, a hit gives
        the same bits as a full prefill. With a quantized format, the spec then needs
        `prefill=stored`: a chunk attends to its own rows in their quantized form. Reused lengths
        are multiples of 512 tokens, and no decoded token is reused.
        """
        limit = None if max_bytes is None else as_bytes(max_bytes)
        if limit is not None and limit < 0:
            raise ValueError(f"max_bytes={max_bytes}: 0 or more is needed")
        self.salt = salt
        self.exact = exact
        self.prefix_store: PrefixStore | None = None
        if store is not None:
            tiers = store if isinstance(store, Tiers) else open_tiers(store)
            self.prefix_store = PrefixStore(tiers, shared=tiers is store)
        self.memory = PrefixMemory(limit, self.prefix_store, EXACT_CHUNK if exact else None)
        if self.prefix_store is not None:
            # Tied to the memory, not to `self`: a namespace may still use it.
            finalize(self.memory, self.prefix_store.close)

    @property
    def max_bytes(self) -> int | None:
        """The limit of bytes; None: no limit."""
        return self.memory.max_bytes

    def open_namespace(
        self, model: PreTrainedModel, cache: TransformersCache, weights_check_interval: float = 0.0
    ) -> PrefixNamespace:
        """Return the namespace of a model and the spec of `cache`.

        It checks the weights when it matches or inserts a prompt, unless the last check was less
        than `weights_check_interval` seconds ago.
        """
        layers = iterate_attention(*cache.spec.layers)
        if self.exact and any(layer.seals and layer.prefill == "dense" for layer in layers):
            raise ValueError(
                "exact prefixes with prefill=dense: a chunk reads its own rows before they are "
                "quantized, so results depend on chunk ends; set prefill=stored"
            )
        if cache.spec.prunes:
            raise ValueError(
                f"prefixes with {describe_spec(cache.spec)}: rows pruned from a prompt may matter "
                "to the next one; remove the prune from the spec, or use no prefixes"
            )
        return PrefixNamespace(self.memory, model, cache, self.salt, weights_check_interval)

    def __enter__(self) -> Prefixes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish pending store writes and free all prefixes.

        Stop waiting for the writes if a store does not answer. Nothing is written afterwards,
        unless `store` was given as `Tiers`: those stay open.
        """
        if self.prefix_store is not None:
            self.prefix_store.close()
        self.clear()

    def abandon(self) -> None:
        """Free all prefixes and drop pending store writes."""
        self.clear()
        if self.prefix_store is not None:
            self.prefix_store.close(0.0)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait `seconds` at most for pending writes; return whether all are done.

        A failed write counts as done, and `stats()` reports it. Stop waiting if a store does not
        answer for ten seconds.
        """
        return self.prefix_store is None or self.prefix_store.flush(seconds)

    @property
    def nbytes_unwritten(self) -> int:
        """Bytes queued to be written to the store."""
        return 0 if self.prefix_store is None else self.prefix_store.tiers.writer.nbytes

    def clear(self) -> None:
        """Free all prefixes in memory; stores stay as they are."""
        self.memory.clear()

    def evict(self, nbytes: int) -> int:
        """Evict prefixes until `nbytes` are freed or none is left; return the bytes freed."""
        return self.memory.evict(nbytes).nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes, including pages that running requests use too."""
        return self.memory.nbytes

    def stats(self) -> dict[str, Any]:
        """Return counts of prefixes, bytes, hits and misses; with a store, its stats."""
        store = {} if self.prefix_store is None else {"store": self.prefix_store.stats()}
        return {**self.memory.stats(), **store}
