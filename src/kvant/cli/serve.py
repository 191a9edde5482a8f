"""`kvant serve`: a model for clients of OpenAI's interface."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from kvant import checkpoints
from kvant.attention import check_backend
from kvant.cli import options
from kvant.cli.options import check_readable, check_spec
from kvant.cli.session import attached, prefixes_in, show
from kvant.devices import named_device, named_dtype
from kvant.sizes import parse_size
from kvant.stores import open_tiers

KEYS, SECRET = "KVANT_API_KEYS", "KVANT_SECRET"
INSIDE = "kvant-inside"  # the name of the model inside the package


def serve(
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    kv_cache: options.KVCache = None,
    max_bytes: Annotated[str | None, Option(help="Bytes of all caches together: 8GiB.")] = None,
    max_sequences: Annotated[int, Option(min=1, help="Sequences that go on at a time.")] = 16,
    max_context: options.MaxContext = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Where a client says no number.")] = 1024,
    chunk_seconds: Annotated[
        float | None, Option(help="That a chunk of a prompt may keep others from a token.")
    ] = None,
    max_waiting: Annotated[int, Option(min=0, help="Requests that may wait; then 429.")] = 256,
    store: options.Store = None,
    host: Annotated[str, Option(help="Another one only with keys.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535)] = 8000,
    api_keys: Annotated[Path | None, Option(help=f"Keys, one a line; or {KEYS}.")] = None,
    name: Annotated[str | None, Option(help="What clients call the model.")] = None,
    grace: Annotated[int, Option(min=0, help="Seconds for requests as it ends.")] = 30,
    backend: options.Backend = None,
    pack: options.Pack = True,
    guard: options.Guard = True,
    device: options.Device = None,
    dtype: options.DType = "auto",
) -> None:
    """Serve a model to clients of OpenAI's interface."""
    from kvant import server

    spec = "affine8" if kv_cache is None else kv_cache
    limit = None if max_bytes is None else parse_size(max_bytes)
    if api_keys is not None:
        check_readable(api_keys, "--api-keys")
    keys = server.Keys(server.keys_in(api_keys, os.environ.get(KEYS)), os.environ.get(SECRET, ""))
    server.check_host(host, len(keys))
    check_spec(spec)
    check_backend(backend)
    named_device(device)
    named_dtype(dtype)
    checkpoints.check(model)
    if store:
        open_tiers(store)
    served, tokenizer = checkpoints.load(
        model, trust_code=trust_remote_code, device=device, dtype=dtype
    )
    stored = attached(served, spec, tokenizer, guard)
    from kvant.engine import Engine
    from kvant.prefixes import Prefixes

    most = "1GiB" if limit is None else None
    given: dict[str, Any] = {
        "max_bytes": limit,
        "max_sequences": max_sequences,
        "max_context": max_context,
        "chunk_seconds": chunk_seconds,
        "backend": backend,
        "pack": pack,
    }
    with (
        prefixes_in(store, quiet=True, most=most) as kept,
        Engine(served, tokenizer, stored, prefixes=kept or Prefixes(most), **given) as engine,
    ):
        service = server.Service(
            engine,
            name or (Path(model).name if model else INSIDE),
            keys,
            max_waiting=max_waiting,
            max_new_tokens=max_new_tokens,
        )
        running = server.server_of(server.create_app(service, host), host, port, grace)

        def begun() -> None:
            shown = f"[{host}]" if ":" in host else host
            show(f"{service.model} at http://{shown}:{running.port}/v1")

        running.begun, running.ending = begun, service.close
        running.run()
