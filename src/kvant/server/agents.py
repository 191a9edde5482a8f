"""The configurations of coding agents for a server: what `kvant serve --print-config` prints."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import NamedTuple

KEY_VARIABLE = "KVANT_API_KEY"  # an agent's key, where the server has keys
NO_KEY = "none"  # sent to a server without keys: agents require some key


class Address(NamedTuple):
    """Where a server listens, and what it serves."""

    url: str  # without a path
    model: str
    has_keys: bool
    max_context: int | None = None
    max_new_tokens: int = 1024


def configure_claude_code(address: Address) -> str:
    names = ["ANTHROPIC_MODEL"]
    names += [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")]
    variables = {
        "ANTHROPIC_BASE_URL": shlex.quote(address.url),
        "ANTHROPIC_AUTH_TOKEN": f"${KEY_VARIABLE}" if address.has_keys else NO_KEY,
        **dict.fromkeys(names, shlex.quote(address.model)),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(address.max_new_tokens),  # memory is reserved for it
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with each request
    }
    return "\n".join(f"export {name}={value}" for name, value in variables.items())


def configure_codex(address: Address) -> str:
    """Return the lines of ~/.codex/config.toml."""
    lines = [
        f"model = {json.dumps(address.model, ensure_ascii=False)}",
        'model_provider = "kvant"',
        'web_search = "disabled"',
        *([f"model_context_window = {address.max_context}"] if address.max_context else ()),
        "",
        "[model_providers.kvant]",
        'name = "kvant"',
        f'base_url = "{address.url}/v1"',
        'wire_api = "responses"',
        *([f'env_key = "{KEY_VARIABLE}"'] if address.has_keys else ()),
    ]
    return "\n".join(lines)


def configure_opencode(address: Address) -> str:
    """Return the text of opencode.json."""
    key = f"{{env:{KEY_VARIABLE}}}" if address.has_keys else NO_KEY
    model = {"name": address.model}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvant",
        "options": {"baseURL": f"{address.url}/v1", "apiKey": key},
        "models": {address.model: model},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"kvant/{address.model}",
        "provider": {"kvant": provider},
    }
    return json.dumps(config, indent=2)


def configure_cline(address: Address) -> str:
    """Return what to enter in its settings."""
    lines = [
        "API Provider: OpenAI Compatible",
        f"Base URL: {address.url}/v1",
        f"API Key: {'your key' if address.has_keys else NO_KEY}",
        f"Model ID: {address.model}",
        *([f"Context Window Size: {address.max_context}"] if address.max_context else ()),
    ]
    return "\n".join(lines)


AGENTS: dict[str, Callable[[Address], str]] = {
    "claude-code": configure_claude_code,
    "codex": configure_codex,
    "opencode": configure_opencode,
    "cline": configure_cline,
}


def make_config(agent: str, address: Address) -> str:
    """Return the configuration of an agent, by its name."""
    if agent not in AGENTS:
        raise ValueError(f"--print-config {agent}: known are {', '.join(AGENTS)}")
    if address.url.endswith(":0"):
        raise ValueError("--print-config with --port 0: give the port that the server has")
    return AGENTS[agent](address)
