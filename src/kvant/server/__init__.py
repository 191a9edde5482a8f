"""HTTP server for an engine, with the APIs of OpenAI, Anthropic and Ollama."""

from kvant.errors import CacheError

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise CacheError(f"{error}: pip install 'kvant[server]'") from None

from kvant.server.agents import Address, make_config
from kvant.server.app import create_app
from kvant.server.http_server import HttpServer, check_host, make_server
from kvant.server.service import Service, open_service
from kvant.server.settings import ApiKeys, ServerSettings, load_keys, parse_keys
from kvant.server.tracing import open_tracer

__all__ = [
    "Address",
    "ApiKeys",
    "HttpServer",
    "ServerSettings",
    "Service",
    "check_host",
    "create_app",
    "load_keys",
    "make_config",
    "make_server",
    "open_service",
    "open_tracer",
    "parse_keys",
]
