"""`kvant serve`: run an HTTP server with the APIs of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from kvant.cli import print_note
from kvant.cli.options import EngineOptions, check_readable, expand_options
from kvant.cli.session import attach_model, open_prefixes

AGENT_NAMES = "claude-code, codex, opencode, cline"
AdapterFolders = Annotated[
    list[str] | None,
    Option(help="LoRA adapter of PEFT that clients name as model: NAME=FOLDER; may be repeated."),
]


@expand_options
def serve(
    engine_options: EngineOptions,
    max_new_tokens: Annotated[int, Option(min=1, help="Default limit on generated tokens.")] = 1024,
    chunk_seconds: Annotated[
        float | None,
        Option(
            help="Longest delay that one prompt may cause other requests (up to 4 prompts add up)."
        ),
    ] = None,
    max_waiting: Annotated[
        int, Option(min=0, help="Limit on waiting requests; beyond it clients get status 429.")
    ] = 256,
    host: Annotated[
        str, Option(help="Address to listen on; without keys, only a local one.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000,
    api_keys: Annotated[
        Path | None,
        Option(help="File of API keys, one KEY or 'admin KEY' per line; or set KVANT_API_KEYS."),
    ] = None,
    name: Annotated[str | None, Option(help="Model name for clients.")] = None,
    adapter: AdapterFolders = None,
    replicas: Annotated[
        int | None, Option(min=1, help="Number of engines on Ray Serve, each with --max-bytes.")
    ] = None,
    grace: Annotated[
        int, Option(min=0, help="Seconds that running requests get at shutdown.")
    ] = 30,
    print_config: Annotated[
        str | None,
        Option(help="Print the configuration of an agent and exit: " + AGENT_NAMES + "."),
    ] = None,
) -> None:
    """Serve a model with the APIs of OpenAI, Anthropic and Ollama."""
    if api_keys is not None:
        check_readable(api_keys, "--api-keys")
    engine_options.check()
    spec, store = engine_options.spec, engine_options.store or []
    from kvant import server

    settings = server.ServerSettings(
        **asdict(engine_options) | {"kv_cache": spec, "store": store},
        name=name,
        adapters=_parse_adapters(adapter or []),
        max_new_tokens=max_new_tokens,
        max_waiting=max_waiting,
        chunk_seconds=chunk_seconds,
    )
    keys = server.load_keys(api_keys)
    server.check_host(host, len(keys))
    settings.check()

    model_name = settings.served_model_name
    if print_config is not None:
        url, context = _make_url(host, port), engine_options.max_context
        address = server.Address(url, model_name, len(keys) > 0, context, max_new_tokens)
        print(server.make_config(print_config, address))
        return

    def print_address(port: int) -> None:
        print_note(f"{model_name} at {_make_url(host, port)}/v1")

    if replicas is not None:
        from kvant.serve.ray import DeploymentSettings, run

        options = {"replicas": replicas, "api_keys": api_keys, "host": host, "grace": grace}
        values = settings.model_dump() | options
        run(DeploymentSettings.model_validate(values), port, print_address)
        return
    loaded, tokenizer = settings.load()
    attached_spec = attach_model(loaded, spec, tokenizer, settings.guard)
    with (
        server.open_tracer() as tracer,  # closed last, when all requests have ended
        open_prefixes(store, quiet=True, max_bytes=settings.max_prefix_bytes) as prefixes,
        server.open_service(settings, loaded, tokenizer, attached_spec, prefixes, keys) as service,
    ):
        app = server.create_app(service, host, tracer)
        http_server = server.make_server(app, host, port, grace)
        http_server.on_started, http_server.on_stopping = print_address, service.close
        http_server.run()


def _parse_adapters(entries: list[str]) -> dict[str, str]:
    """Return the folders of adapters by name."""
    adapters = dict[str, str]()
    for entry in entries:
        name, _, folder = entry.partition("=")
        if not folder or name in adapters:
            reason = "this name is given twice" if folder else "NAME=FOLDER is needed"
            raise ValueError(f"--adapter {entry}: {reason}")
        adapters[name] = folder
    return adapters


def _make_url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"  # brackets: IPv6
