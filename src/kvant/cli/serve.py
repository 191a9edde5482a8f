"""`kvant serve`: run an HTTP server compatible with OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from kvant import checkpoints
from kvant.cli import options
from kvant.cli.options import check_backend, check_readable, check_stores
from kvant.cli.session import attach_model, open_prefixes, print_note
from kvant.platform.devices import check_device, check_dtype
from kvant.platform.sizes import parse_size
from kvant.spec.auto import check_spec_or_auto

DefaultMaxNewTokens = Annotated[int, Option(min=1, help="Default limit on generated tokens.")]
ChunkSeconds = Annotated[
    float | None,
    Option(help="Longest delay that one prompt may cause other requests (up to 4 prompts add up)."),
]
MaxWaiting = Annotated[
    int, Option(min=0, help="Limit on waiting requests; beyond it clients get status 429.")
]
Host = Annotated[str, Option(help="Address to listen on; without keys, only a local one.")]
ApiKeysFile = Annotated[
    Path | None,
    Option(help="File of API keys, one KEY or 'admin KEY' per line; or set KVANT_API_KEYS."),
]
Replicas = Annotated[
    int | None, Option(min=1, help="Number of engines on Ray Serve, each with --max-bytes.")
]
Grace = Annotated[int, Option(min=0, help="Seconds that running requests get at shutdown.")]


def serve(
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    kv_cache: options.KVCache = None,
    max_bytes: Annotated[str | None, Option(help="Limit on all caches together: 8GiB.")] = None,
    max_sequences: Annotated[int, Option(min=1, help="Limit on running sequences.")] = 16,
    max_context: options.MaxContext = None,
    max_new_tokens: DefaultMaxNewTokens = 1024,
    chunk_seconds: ChunkSeconds = None,
    max_waiting: MaxWaiting = 256,
    store: options.Store = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000,
    api_keys: ApiKeysFile = None,
    name: Annotated[str | None, Option(help="Model name for clients.")] = None,
    replicas: Replicas = None,
    grace: Grace = 30,
    backend: options.Backend = None,
    pack: options.Pack = True,
    guard: options.Guard = True,
    device: options.Device = None,
    dtype: options.DType = "auto",
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API."""
    spec = "affine8" if kv_cache is None else kv_cache
    check_spec_or_auto(spec)
    _check_early(max_bytes, api_keys, store)
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
        url_host = f"[{host}]" if ":" in host else host  # brackets around an IPv6 address
        print_note(f"{settings.served_model_name} at http://{url_host}:{port}/v1")

    if replicas is not None:
        from kvant.serve.ray import DeploymentSettings, run

        values = settings.model_dump()
        values |= {"replicas": replicas, "api_keys": api_keys, "host": host, "grace": grace}
        run(DeploymentSettings.model_validate(values), port, print_address)
        return
    loaded, tokenizer = settings.load()
    attached_spec = attach_model(loaded, spec, tokenizer, guard)
    with (
        open_prefixes(store, quiet=True, max_bytes=settings.max_prefix_bytes) as prefixes,
        settings.open_service(loaded, tokenizer, attached_spec, prefixes, keys) as service,
    ):
        http_server = server.make_server(server.create_app(service, host), host, port, grace)
        http_server.on_started, http_server.on_stopping = print_address, service.close
        http_server.run()


def _check_early(max_bytes: str | None, api_keys: Path | None, store: list[str] | None) -> None:
    """Raise an error for an invalid size, file or store before the import of torch."""
    if max_bytes is not None:
        parse_size(max_bytes)
    if api_keys is not None:
        check_readable(api_keys, "--api-keys")
    check_stores(store)
