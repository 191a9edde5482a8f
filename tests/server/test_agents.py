"""Test the configurations of agents, and requests of the form that agents send."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from typing import Any

import httpx2
import pytest

from kvant.cli.serve import AGENT_NAMES
from kvant.server import Address, make_config
from kvant.server.agents import AGENTS
from kvant.server.messages_api import MessagesRequest

URL = "http://127.0.0.1:8000"
OPEN = Address(URL, "inside", has_keys=False)
LOCKED = Address(URL, "inside", has_keys=True, max_context=4096)


def test_all_agents_are_named_in_the_help() -> None:
    assert AGENT_NAMES.split(", ") == [*AGENTS]
    with pytest.raises(ValueError, match="--print-config aider: known are claude-code, codex"):
        make_config("aider", OPEN)
    with pytest.raises(ValueError, match="--port 0: give the port"):
        make_config("codex", OPEN._replace(url="http://127.0.0.1:0"))


def test_claude_code_gets_variables() -> None:
    lines = [shlex.split(line) for line in make_config("claude-code", OPEN).splitlines()]
    assert all(words[0] == "export" and len(words) == 2 for words in lines)
    variables = dict(words[1].split("=") for words in lines)
    assert variables["ANTHROPIC_BASE_URL"] == URL  # without /v1
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert variables["ANTHROPIC_MODEL"] == variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "inside"
    assert "ANTHROPIC_AUTH_TOKEN=$KVANT_API_KEY" in make_config("claude-code", LOCKED)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "Qwen3 (local)", 'a"b'])
def test_names_are_quoted(name: str) -> None:
    address = OPEN._replace(model=name)
    (line,) = (
        line
        for line in make_config("claude-code", address).splitlines()
        if "ANTHROPIC_MODEL=" in line
    )
    assert shlex.split(line)[1] == f"ANTHROPIC_MODEL={name}"
    assert tomllib.loads(make_config("codex", address))["model"] == name
    opencode = json.loads(make_config("opencode", address))
    assert opencode["model"].split("/", 1)[1] in opencode["provider"]["kvant"]["models"]


@pytest.mark.parametrize("address", [OPEN, LOCKED])
def test_codex_gets_toml(address: Address) -> None:
    config = tomllib.loads(make_config("codex", address))
    provider = config["model_providers"][config["model_provider"]]
    assert config["model"] == "inside" and provider["base_url"] == f"{URL}/v1"
    assert provider["wire_api"] == "responses"
    assert provider.get("env_key") == ("KVANT_API_KEY" if address.has_keys else None)
    assert config.get("model_context_window") == address.max_context


@pytest.mark.parametrize("address", [OPEN, LOCKED])
def test_opencode_gets_json(address: Address) -> None:
    config = json.loads(make_config("opencode", address))
    name, model = config["model"].split("/", 1)
    provider = config["provider"][name]
    assert model in provider["models"] and provider["options"]["baseURL"] == f"{URL}/v1"
    key = "{env:KVANT_API_KEY}" if address.has_keys else "none"
    assert provider["options"]["apiKey"] == key


def test_cline_gets_what_to_enter() -> None:
    text = make_config("cline", LOCKED)
    assert f"Base URL: {URL}/v1\n" in text and "Model ID: inside\n" in text
    assert text.endswith("Context Window Size: 4096")


MARK = {"cache_control": {"type": "ephemeral"}}


def make_claude_body(accounting: str) -> dict[str, Any]:
    header = f"x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={accounting};"
    return {
        "model": "inside",
        "max_tokens": 4,
        "stream": True,
        "temperature": 1,
        "system": [
            {"type": "text", "text": header},
            {"type": "text", "text": "You help with code."} | MARK,
            {"type": "text", "text": "Be brief."} | MARK,
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<reminder>Today is Friday.</reminder>"},
                    {"type": "text", "text": "Read a.py"} | MARK,
                ],
            }
        ],
        "metadata": {"user_id": json.dumps({"session_id": "1"})},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }


def test_a_request_of_claude_code_is_answered(running: tuple[Any, str]) -> None:
    headers = {"anthropic-beta": "claude-code-20250219", "anthropic-version": "2023-06-01"}
    url = f"{running[1]}/v1/messages?beta=true"
    answer = httpx2.post(url, json=make_claude_body("a"), headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.text.startswith("event: ping") and "event: message_stop" in answer.text


def test_accounting_line_is_not_part_of_the_prompt() -> None:
    """It changes with each request, so that no prefix would be shared."""
    one, other = (
        MessagesRequest.model_validate(make_claude_body(text)).chat_request.messages
        for text in ("a", "b")
    )
    assert one == other and one[0].template_dict == {
        "role": "system",
        "content": "You help with code.Be brief.",
    }


def test_a_request_of_codex_is_answered(running: tuple[Any, str]) -> None:
    body = {
        "model": "inside",
        "instructions": "You help with code.",
        "input": [
            {
                "type": "message",
                "role": role,
                "content": [{"type": "input_text", "text": text}],
            }
            for role, text in (("developer", "Be brief."), ("user", "Read a.py"))
        ],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": "1",
        "client_metadata": {"installation": "1"},
        "max_output_tokens": 4,
    }
    answer = httpx2.post(f"{running[1]}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert re.search("event: response.(incomplete|completed)", answer.text)


def test_a_request_of_an_openai_compatible_provider_is_answered(running: tuple[Any, str]) -> None:
    """As OpenCode and Cline send them."""
    body = {
        "model": "inside",
        "messages": [
            {"role": "system", "content": "You help with code."},
            {"role": "user", "content": [{"type": "text", "text": "Read a.py"}]},
        ],
        "temperature": 0,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = httpx2.post(f"{running[1]}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert '"usage": {"prompt_tokens"' in answer.text
