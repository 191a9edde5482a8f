"""An engine over HTTP, for clients of OpenAI's interface."""

from kvant.errors import CacheError

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise CacheError(f"{error}: pip install 'kvant[server]'") from None

from kvant.server.access import Keys, keys_in, known
from kvant.server.app import create_app
from kvant.server.running import Server, check_host, server_of
from kvant.server.service import Service
from kvant.server.settings import Settings

__all__ = [
    "Keys",
    "Server",
    "Service",
    "Settings",
    "check_host",
    "create_app",
    "keys_in",
    "known",
    "server_of",
]
