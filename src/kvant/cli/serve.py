"""`kvant serve`: a model for clients of OpenAI's interface."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from kvant import checkpoints
from kvant.cli import options
from kvant.cli.options import check_backend, check_readable, check_stores
from kvant.cli.session import attach_model, open_prefixes, print_note
from kvant.devices import check_device, check_dtype
from kvant.sizes import parse_size
from kvant.spec.auto import check_spec_or_auto


def serve(
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    kv_cache: options.KVCache = None,
    max_bytes: Annotated[str | None, Option(help="Bytes of all caches together: 8GiB.")] = None,
    max_sequences: Annotated[int, Option(min=1, help="Sequences that go on at a time.")] = 16,
    max_context: options.MaxContext = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Where a client says no number.")] = 1024,
    chunk_seconds: Annotated[
        float | None, Option(help="That a prompt may keep others from a token; up to 4 add up.")
    ] = None,
    max_waiting: Annotated[int, Option(min=0, help="Requests that may wait; then 429.")] = 256,
    store: options.Store = None,
    host: Annotated[str, Option(help="Another one only with keys.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535)] = 8000,
    api_keys: Annotated[
        Path | None, Option(help="Keys, one a line, or 'admin KEY'; or KVANT_API_KEYS.")
    ] = None,
    name: Annotated[str | None, Option(help="What clients call the model.")] = None,
    replicas: Annotated[
        int | None, Option(min=1, help="So many engines, on Ray Serve: each of --max-bytes.")
    ] = None,
    grace: Annotated[int, Option(min=0, help="Seconds for requests as it ends.")] = 30,
    backend: options.Backend = None,
    pack: options.Pack = True,
    guard: options.Guard = True,
    device: options.Device = None,
    dtype: options.DType = "auto",
) -> None:
    """Serve a model to clients of OpenAI's interface."""
    spec = "affine8" if kv_cache is None else kv_cache
    check_spec_or_auto(spec)
    _check_words(max_bytes, api_keys, store)
    check_backend(backend)
    check_device(device)
    check_dtype(dtype)
    checkpoints.check_checkpoint(model)
    from kvant import server

    settings = server.ServerSettings(
        model=model,
        name=name,
        trust_remote_code=trust_remote_code,
        kv_cache=spec,
        max_bytes=max_bytes,
        max_sequences=max_sequences,
        max_context=max_context,
        max_new_tokens=max_new_tokens,
        max_waiting=max_waiting,
        chunk_seconds=chunk_seconds,
        store=store or [],
        backend=backend,
        pack=pack,
        guard=guard,
        device=device,
        dtype=dtype,
    )
    keys = server.load_keys(api_keys)
    server.check_host(host, len(keys))
    settings.check()

    def print_address(port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        print_note(f"{settings.served_model_name} at http://{shown}:{port}/v1")

    if replicas is not None:
        from kvant.serve.ray import DeploymentSettings, run

        more = {"replicas": replicas, "api_keys": api_keys, "host": host, "grace": grace}
        run(DeploymentSettings.model_validate(settings.model_dump() | more), port, print_address)
        return
    served, tokenizer = settings.load()
    spec = attach_model(served, spec, tokenizer, guard)
    with (
        open_prefixes(store, quiet=True, max_bytes=settings.max_prefix_bytes) as kept,
        settings.open_service(served, tokenizer, spec, kept, keys) as service,
    ):
        running = server.make_server(server.create_app(service, host), host, port, grace)
        running.on_started, running.on_stopping = print_address, service.close
        running.run()


def _check_words(max_bytes: str | None, api_keys: Path | None, store: list[str] | None) -> None:
    """Refuse a wrong size, file or store's name before torch and the server are imported."""
    if max_bytes is not None:
        parse_size(max_bytes)
    if api_keys is not None:
        check_readable(api_keys, "--api-keys")
    check_stores(store)
