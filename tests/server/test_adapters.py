"""Test adapters in the server: a request names one as its model, in each API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from kvant import checkpoints
from kvant.server import ServerSettings
from peft_files import save_adapter
from server.conftest import generate_alone, serve_model

PROMPT = "import os\n\ndef read(path):\n"
MESSAGES = [{"role": "user", "content": PROMPT}]
COUNT = 8
Served = tuple[Any, dict[str, str]]  # the client, and the expected reply by model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, tokenizer = checkpoints.load(None, dtype="float32")
    paths = {"poet": tmp_path_factory.mktemp("a"), "team/lawyer": tmp_path_factory.mktemp("b")}
    expected = {"inside": generate_alone((model, tokenizer), PROMPT, COUNT)}
    for seed, (name, path) in enumerate(paths.items()):
        lora: dict[str, Any] = {"r": 2, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]}
        merged = save_adapter(model, path, seed, **lora)
        expected[name] = generate_alone((merged, tokenizer), PROMPT, COUNT)
    assert len(set(expected.values())) == 3
    with (
        serve_model(model, tokenizer, max_sequences=4, adapters=paths) as (_, url),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client, expected


def post(client: Any, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_each_api_replies_with_the_named_adapter(served: Served) -> None:
    client, expected = served
    limits = {"temperature": 0, "max_tokens": COUNT}
    ollama: dict[str, Any] = {"stream": False, "options": {"temperature": 0, "num_predict": COUNT}}
    for name, text in expected.items():
        reply = post(client, "/v1/chat/completions", model=name, messages=MESSAGES, **limits)
        assert (reply["model"], reply["choices"][0]["message"]["content"]) == (name, text)
        reply = post(client, "/v1/completions", model=name, prompt=PROMPT, **limits)
        assert (reply["model"], reply["choices"][0]["text"]) == (name, text)
        reply = post(client, "/v1/messages", model=name, messages=MESSAGES, **limits)
        assert (reply["model"], reply["content"][0]["text"]) == (name, text)
        options = {"max_output_tokens": COUNT, "temperature": 0}
        reply = post(client, "/v1/responses", model=name, input=PROMPT, **options)
        assert (reply["model"], reply["output"][0]["content"][0]["text"]) == (name, text)
        for asked in (name, f"{name}:latest"):
            reply = post(client, "/api/chat", model=asked, messages=MESSAGES, **ollama)
            assert (reply["model"], reply["message"]["content"]) == (name, text)
        reply = post(client, "/api/generate", model=name, prompt=PROMPT, raw=True, **ollama)
        assert (reply["model"], reply["response"]) == (name, text)
    reply = post(client, "/v1/completions", prompt=PROMPT, **limits)
    assert (reply["model"], reply["choices"][0]["text"]) == ("inside", expected["inside"])


def test_lists_have_the_adapters(served: Served) -> None:
    client, expected = served
    models = client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == [*expected]
    assert (models["first_id"], models["last_id"]) == ("inside", "team/lawyer")
    assert [model.get("parent") for model in models["data"]] == [None, "inside", "inside"]
    assert client.get("/v1/models/team/lawyer").json() == models["data"][2]
    for path in ("/api/tags", "/api/ps"):
        tags = client.get(path).json()["models"]
        assert [tag["name"] for tag in tags] == [*expected]
        assert len({tag["digest"] for tag in tags}) == 3
        assert tags[1]["size"] > tags[0]["size"]
        assert tags[1]["details"]["parent_model"] == "inside"
    shown = post(client, "/api/show", model="poet:latest")
    assert shown["details"]["parent_model"] == "inside"


def test_unknown_model_is_refused_with_the_known_ones(served: Served) -> None:
    client, _ = served
    chat = {"messages": MESSAGES}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat,
        "/v1/messages": chat | {"max_tokens": 1},
        "/api/chat": chat,
        "/tokenize": {"prompt": "a"},
    }
    for path, body in bodies.items():
        response = client.post(path, json={"model": "pirate"} | body)
        assert response.status_code == 404
        assert "'inside', 'poet', 'team/lawyer'" in response.text


def test_settings_check_adapters_before_the_model_is_loaded(tmp_path: Path) -> None:
    for adapters, message in (
        ({"a": str(tmp_path)}, r"adapter_config\.json cannot be read"),
        ({"kvant-inside": str(tmp_path)}, "two models are called kvant-inside"),
        ({"kvant-inside:latest": str(tmp_path)}, "two models are called kvant-inside"),
        ({"poet": str(tmp_path), "poet:latest": str(tmp_path)}, "two models are called poet"),
        ({"../a": str(tmp_path)}, "adapter name"),
    ):
        with pytest.raises(ValueError, match=message):
            ServerSettings(adapters=adapters).check()
