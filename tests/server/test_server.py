"""Test a server beyond its answers: authorization, limits, and disconnecting clients."""

from __future__ import annotations

import gc
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import kvant
from kvant.server import ApiKeys, check_host, parse_keys
from server.conftest import post_and_leave, serve_model

PROMPT = "import os\n\ndef read(path):\n"
KVANT = str(Path(sys.executable).with_name("kvant"))


def wait_until_idle(service: Any) -> dict[str, Any]:
    """Return the engine's metrics once it is idle."""
    until = time.monotonic() + 30
    while (stats := service.engine.stats())["running"] or stats["waiting"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    return dict(stats)


def test_health_and_metrics_are_served(running: tuple[Any, str]) -> None:
    service, url = running
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/ready").status_code == 200
    body = {"prompt": PROMPT, "max_tokens": 3, "n": 2, "temperature": 1, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=body)
    wait_until_idle(service)
    metrics = httpx.get(f"{url}/metrics").text
    figures = dict(
        line.rsplit(" ", 1) for line in metrics.splitlines() if line and not line.startswith("#")
    )
    assert float(figures['vllm:generation_tokens_total{model_name="inside"}']) >= 3
    delays = [
        float(figures[f'vllm:{name}_seconds_count{{model_name="inside"}}'])
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    ]
    assert 1 <= delays[0] <= delays[2] and delays[1] >= 4  # of requests, and between their tokens
    assert float(figures['kvant_cache_bytes{state="held"}']) > 0
    assert float(figures['kvant_http_responses_total{status="200"}']) >= 3


def test_stopped_server_holds_nothing(bundled_model: tuple[Any, Any]) -> None:
    with serve_model(*bundled_model) as (service, url):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).is_success
        engine = weakref.ref(service.engine)
    del service
    gc.collect()
    assert engine() is None


def test_page_is_small_and_self_contained(running: tuple[Any, str]) -> None:
    first, second = (httpx.get(running[1]) for _ in range(2))
    assert first.status_code == 200 and len(first.content) < 40_000
    assert "http:" not in first.text and "https:" not in first.text and "NONCE" not in first.text
    policy = first.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert policy != second.headers["Content-Security-Policy"]
    assert "innerHTML" not in first.text  # model output is text


def test_memory_use_is_itemized(running: tuple[Any, str], bundled_model: tuple[Any, Any]) -> None:
    service, url = running
    httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT * 9, "max_tokens": 3})
    wait_until_idle(service)
    stats = httpx.get(f"{url}/v1/stats").json()
    expected = kvant.plan(bundled_model[0], "affine8", context=1).nbytes_per_token
    assert (stats["kv_cache"], stats["bytes_a_token"]) == ("affine8", expected)
    assert stats["prefixes"]["nbytes_idle"] == stats["nbytes_held"] > 0


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 400, "the body must be a JSON object"),
        (b"\xff\xfe", 400, "body"),
        (b'{"prompt": [1, "a"]}', 400, "Input should be a valid"),
        (b'{"prompt": 3}', 400, "prompt"),
        (b'{"prompt": "a", "colour": 1}', 400, "colour: the server has no such field"),
        (b'{"prompt": "a", "max_tokens": "3"}', 400, "max_tokens"),
        (b'{"prompt": ""}', 400, "the prompt has no tokens"),
        (b'{"prompt": [99999999]}', 400, "the prompt has token 99999999"),
        (b'{"prompt": "a", "model": "other"}', 404, "this server has 'inside'"),
        (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413, "the body exceeds 4194304 bytes"),
        (b'{"prompt": "' + b"a b " * 100_000 + b'"}', 400, "context"),
        (b'{"prompt": "\\ud800abc"}', 400, "the body has U+D800: half of a surrogate pair"),
        (b'{"prompt": "\xed\xa0\x80"}', 400, "the body has U+D800: half of a surrogate pair"),
        (b'{"prompt": "a", "metadata": {"\\uDC00": "a"}}', 400, "the body has U+DC00"),
        (b'{"prompt": "a", "repetition_penalty": 1e-45}', 400, "0.01 to 100.0 is needed"),
        ('{"prompt": "a", "logit_bias": {"\u0663": 5}}'.encode(), 400, "is not a token id"),
        (b'{"prompt": "a", "logit_bias": {"01": 5, "1": -5}}', 400, "'01' is not a token id"),
    ],
    ids=range(18),
)
def test_malformed_bodies_are_refused(
    running: tuple[Any, str], body: bytes, status: int, message: str
) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{running[1]}/v1/completions", content=body, headers=headers)
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_lone_surrogate_is_refused_before_generation(
    running: tuple[Any, str], stream: bool
) -> None:
    """Also if a reply would only repeat it; a complete pair is one character."""
    body = '{"input": "a", "max_output_tokens": 2, "stream": %s, "metadata": {"a": "%s"}}'
    headers = {"Content-Type": "application/json"}
    for half, status in (("\\ud800", 400), ("\\ud83d\\ude00", 200)):
        content = body % (str(stream).lower(), half)
        response = httpx.post(f"{running[1]}/v1/responses", content=content, headers=headers)
        assert response.status_code == status


def test_too_many_continuations_is_no_context_error(
    running: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "a", "n": 1000, "max_tokens": 1}
    error = httpx.post(f"{running[1]}/v1/completions", json=body).json()["error"]
    assert error["message"].startswith("n=1000 with max_sequences=8") and error["code"] is None
    body = {"prompt": "a", "n": 8, "max_tokens": 2000}
    monkeypatch.setattr(running[0].engine._worker.scheduler, "max_bytes", 8 << 20)
    error = httpx.post(f"{running[1]}/v1/completions", json=body).json()["error"]
    assert "of a limit of 8 MiB" in error["message"] and error["code"] is None
    body = {"prompt": "a b " * 5000, "max_tokens": 1}
    error = httpx.post(f"{running[1]}/v1/completions", json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_unsupported_content_parts_are_named(running: tuple[Any, str]) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    body = {"messages": [{"role": "user", "content": [sound]}]}
    response = httpx.post(f"{running[1]}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages.0.content.0")


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [-1] * 1_000_000},
        {"prompt": ["a"] * 100_000},
        {"prompt": [[1]] * 100_000},
        {"prompt": "a"} | {f"x{n}": 1 for n in range(100_000)},
        {"prompt": ["a"] * 128, "n": 8},
    ],
    ids=range(5),
)
def test_large_invalid_bodies_are_refused_at_once(
    running: tuple[Any, str], body: dict[str, Any]
) -> None:
    response = httpx.post(f"{running[1]}/v1/completions", json=body, timeout=60)
    assert response.status_code == 400 and len(response.content) < 2000


def test_error_after_the_start_of_a_stream_is_a_server_error(
    running: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(sequences: Any, logits: Any, drafts: Any) -> list[list[Exception]]:
        return [[ValueError("an internal detail")]] * len(sequences)

    monkeypatch.setattr("kvant.engine.worker.sample_tokens", fails)
    response = httpx.post(f"{running[1]}/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["message"], error["type"]) == ("the request failed", "server_error")


def test_body_of_another_content_type_is_refused(running: tuple[Any, str]) -> None:
    """A cross-origin page may send it without a preflight request."""
    headers = {"Content-Type": "text/plain"}
    response = httpx.post(
        f"{running[1]}/v1/completions", content=b'{"prompt": "a"}', headers=headers
    )
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_client_frees_its_sequence(running: tuple[Any, str], stream: bool) -> None:
    service, url = running
    wait_until_idle(service)
    before = service.engine.stats()
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_text())
    else:
        post_and_leave(service, f"{url}/v1/completions", body)
    until = time.monotonic() + 30
    while service.engine.stats()["cancelled"] == before["cancelled"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    metrics = wait_until_idle(service)
    assert metrics["cancelled"] == before["cancelled"] + 1
    assert metrics["completion_tokens"] - before["completion_tokens"] < 400


def test_full_queue_answers_retry_after(bundled_model: tuple[Any, Any]) -> None:
    with serve_model(*bundled_model, max_sequences=1, max_waiting=1) as (_, url):
        body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}

        def ask(_: int) -> httpx.Response:
            return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

        with ThreadPoolExecutor(6) as threads:
            responses = list(threads.map(ask, range(6)))
        statuses = [response.status_code for response in responses]
        assert statuses.count(200) >= 2 and statuses.count(429) >= 1 and {*statuses} == {200, 429}
        refused = next(response for response in responses if response.status_code == 429)
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert ask(0).status_code == 200


def test_api_keys_and_tenants_are_isolated(bundled_model: tuple[Any, Any]) -> None:
    keys = ApiKeys(["first-key", "second-key"], "secret")
    with serve_model(*bundled_model, keys=keys) as (_, url):
        prompt = PROMPT * 20

        def ask(key: str | None) -> httpx.Response:
            headers = {} if key is None else {"Authorization": f"Bearer {key}".strip()}
            body = {"prompt": prompt, "max_tokens": 2}
            return httpx.post(f"{url}/v1/completions", json=body, headers=headers)

        for key in (None, "", "third-key", "first-key2"):
            assert ask(key).status_code == 401
        assert httpx.get(f"{url}/v1/models").status_code == 401
        for path in ("/metrics", "/v1/stats"):
            assert httpx.get(f"{url}{path}").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        cached = [
            ask(key).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for key in ("first-key", "second-key", "first-key")
        ]
        assert cached[0] == cached[1] == 0 < cached[2]


def test_cross_origin_page_is_refused(running: tuple[Any, str]) -> None:
    response = httpx.get(f"{running[1]}/v1/models", headers={"Host": "evil.example"})
    assert response.status_code == 400


def test_keys_are_read_from_a_file_and_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# a comment\nfirst-key\n\nfirst-key\n")
    assert parse_keys(file, "second-key, ") == (["first-key", "second-key"], [])
    file.write_text("first-key\nadmin  second-key\nadmin first-key\n")
    assert parse_keys(file, "admin third-key,third-key") == (
        ["first-key", "second-key", "third-key"],
        ["second-key", "first-key", "third-key"],
    )
    file.write_text("#\n")
    with pytest.raises(ValueError, match="there is no key in it"):
        parse_keys(file, None)
    with pytest.raises(ValueError, match="a key of 5 characters"):
        parse_keys(None, "short")
    for wrong in ("first-key admin", "user first-key", "admin admin first-key", "admin"):
        with pytest.raises(ValueError, match="only the word 'admin' may precede it") as caught:
            parse_keys(None, wrong)
        assert "first-key" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "example.org"])
def test_non_loopback_address_needs_keys(host: str) -> None:
    with pytest.raises(ValueError, match="without keys: anyone on the network"):
        check_host(host, 0)
    check_host(host, 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_address_needs_no_keys(host: str) -> None:
    check_host(host, 0)


def test_prompt_that_cannot_fit_names_its_bytes(bundled_model: tuple[Any, Any]) -> None:
    with serve_model(*bundled_model, max_bytes="600KiB", max_sequences=2) as (_, url):
        body = {"prompt": PROMPT * 30, "max_tokens": 200}
        response = httpx.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 400
        assert "of a limit of 600" in response.json()["error"]["message"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_server(*words: str) -> tuple[subprocess.Popen[str], str]:
    port = free_port()
    process = subprocess.Popen(
        [KVANT, "serve", "--port", str(port), "--no-guard", "--dtype", "float32", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line == f"kvant-inside at http://127.0.0.1:{port}/v1\n"
    return process, f"http://127.0.0.1:{port}"


def test_serve_shuts_down_cleanly_and_stores_prefixes(tmp_path: Path) -> None:
    store, body_ = str(tmp_path / "kept"), {"prompt": PROMPT * 30, "max_tokens": 200}
    for restored in (False, True):
        process, url = start_server("--store", store, "--grace", "120")
        responses: list[httpx.Response] = []

        def ask(url: str = url, responses: list[httpx.Response] = responses, **more: Any) -> None:
            body = body_ | {"ignore_eos": True} | more
            responses.append(httpx.post(f"{url}/v1/completions", json=body, timeout=120))

        ask(max_tokens=2)
        details = responses[0].json()["usage"]["prompt_tokens_details"]
        assert (details["restored_tokens"] > 0) == restored
        under_way = threading.Thread(target=ask)
        under_way.start()
        until = time.monotonic() + 30
        while not httpx.get(f"{url}/v1/stats").json()["running"]:
            assert time.monotonic() < until
        process.send_signal(signal.SIGTERM)
        under_way.join(120)
        assert responses[1].status_code == 200  # accepted requests are answered
        assert responses[1].json()["usage"]["completion_tokens"] == 200
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out, error) == (0, "", "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_during_startup_shuts_down_cleanly(name: str) -> None:
    code = (
        "import os, signal, sys\n"
        "from kvant import checkpoints\n"
        "from kvant_command import main\n"
        f"checkpoints.load = lambda *_, **__: os.kill(os.getpid(), signal.{name})\n"
        "sys.argv = ['kvant', 'serve', '--port', '0']\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_before_any_import_exits_cleanly(name: str) -> None:
    code = (
        "import os, signal, sys\n"
        "from kvant_command import main\n"
        "class Finder:\n"
        "    def find_spec(self, *given):\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['kvant', 'serve', '--port', '0']\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
