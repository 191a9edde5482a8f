"""What a server does beside answering: who may ask, how much, and what happens when they go."""

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
from server.conftest import served

PROMPT = "import os\n\ndef read(path):\n"
KVANT = str(Path(sys.executable).with_name("kvant"))


def settled(service: Any) -> dict[str, Any]:
    """The figures of an engine once nobody is served."""
    until = time.monotonic() + 30
    while (told := service.engine.stats())["running"] or told["waiting"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    return dict(told)


def test_health_and_figures(running: tuple[Any, str]) -> None:
    service, url = running
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{url}/ready").status_code == 200
    asked = {"prompt": PROMPT, "max_tokens": 3, "n": 2, "temperature": 1, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=asked)
    settled(service)
    told = httpx.get(f"{url}/metrics").text
    figures = dict(
        line.rsplit(" ", 1) for line in told.splitlines() if line and not line.startswith("#")
    )
    assert float(figures['vllm:generation_tokens_total{model_name="inside"}']) >= 3
    waits = [
        float(figures[f'vllm:{name}_seconds_count{{model_name="inside"}}'])
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    ]
    assert 1 <= waits[0] <= waits[2] and waits[1] >= 4  # of requests, and between their tokens
    assert float(figures['kvant_cache_bytes{state="held"}']) > 0
    assert float(figures['kvant_http_responses_total{status="200"}']) >= 3


def test_a_server_that_ended_keeps_nothing(inside: tuple[Any, Any]) -> None:
    with served(*inside) as (service, url):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).is_success
        engine = weakref.ref(service.engine)
    del service
    gc.collect()
    assert engine() is None


def test_the_page_is_small_and_asks_nobody_else(running: tuple[Any, str]) -> None:
    one, other = (httpx.get(running[1]) for _ in range(2))
    assert one.status_code == 200 and len(one.content) < 40_000
    assert "http:" not in one.text and "https:" not in one.text and "NONCE" not in one.text
    policy = one.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert policy != other.headers["Content-Security-Policy"]
    assert "innerHTML" not in one.text  # what a model says is text


def test_where_the_memory_goes(running: tuple[Any, str], inside: tuple[Any, Any]) -> None:
    service, url = running
    httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT * 9, "max_tokens": 3})
    settled(service)
    told = httpx.get(f"{url}/v1/stats").json()
    expected = kvant.plan(inside[0], "affine8", context=1).nbytes_per_token
    assert (told["kv_cache"], told["bytes_a_token"]) == ("affine8", expected)
    assert told["prefixes"]["nbytes_idle"] == told["nbytes_held"] > 0


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"{", 400, "no JSON"),
        (b"[]", 400, "a body of a JSON object is needed"),
        (b"\xff\xfe", 400, "body"),
        (b'{"prompt": [1, "a"]}', 400, "Input should be a valid"),
        (b'{"prompt": 3}', 400, "prompt"),
        (b'{"prompt": "a", "nobody": 1}', 400, "nobody: not supported"),
        (b'{"prompt": "a", "max_tokens": "3"}', 400, "max_tokens"),
        (b'{"prompt": ""}', 400, "the prompt has no tokens"),
        (b'{"prompt": [99999999]}', 400, "the prompt has token 99999999"),
        (b'{"prompt": "a", "model": "other"}', 404, "this server has 'inside'"),
        (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413, "a body of more than 4194304 bytes"),
        (b'{"prompt": "' + b"a b " * 100_000 + b'"}', 400, "context"),
        (b'{"prompt": "\\ud800abc"}', 400, "the body has U+D800: half of a surrogate pair"),
        (b'{"prompt": "\xed\xa0\x80"}', 400, "the body has U+D800: half of a surrogate pair"),
        (b'{"prompt": "a", "metadata": {"\\uDC00": "a"}}', 400, "the body has U+DC00"),
        (b'{"prompt": "a", "repetition_penalty": 1e-45}', 400, "0.01 to 100.0 is needed"),
        ('{"prompt": "a", "logit_bias": {"\u0663": 5}}'.encode(), 400, "is no token id"),
        (b'{"prompt": "a", "logit_bias": {"01": 5, "1": -5}}', 400, "'01' is no token id"),
    ],
    ids=range(18),
)
def test_malformed_bodies_are_refused(
    running: tuple[Any, str], body: bytes, status: int, told: str
) -> None:
    headers = {"Content-Type": "application/json"}
    found = httpx.post(f"{running[1]}/v1/completions", content=body, headers=headers)
    assert found.status_code == status
    error = found.json()["error"]
    assert told in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_half_of_a_surrogate_pair_is_refused_before_a_reply(
    running: tuple[Any, str], stream: bool
) -> None:
    """Also where a reply would only repeat it; a whole pair is a character."""
    body = '{"input": "a", "max_output_tokens": 2, "stream": %s, "metadata": {"a": "%s"}}'
    headers = {"Content-Type": "application/json"}
    for half, status in (("\\ud800", 400), ("\\ud83d\\ude00", 200)):
        content = body % (str(stream).lower(), half)
        found = httpx.post(f"{running[1]}/v1/responses", content=content, headers=headers)
        assert found.status_code == status


def test_more_continuations_than_places_are_no_matter_of_the_context(
    running: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"prompt": "a", "n": 1000, "max_tokens": 1}
    error = httpx.post(f"{running[1]}/v1/completions", json=asked).json()["error"]
    assert error["message"].startswith("n=1000 with max_sequences=8") and error["code"] is None
    asked = {"prompt": "a", "n": 8, "max_tokens": 2000}
    monkeypatch.setattr(running[0].engine._scheduler, "max_bytes", 8 << 20)
    error = httpx.post(f"{running[1]}/v1/completions", json=asked).json()["error"]
    assert "of a limit of 8 MiB" in error["message"] and error["code"] is None
    asked = {"prompt": "a b " * 5000, "max_tokens": 1}
    error = httpx.post(f"{running[1]}/v1/completions", json=asked).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_other_parts_than_text_are_named(running: tuple[Any, str]) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://localhost/secret"}}
    asked = {"messages": [{"role": "user", "content": [image]}]}
    found = httpx.post(f"{running[1]}/v1/chat/completions", json=asked)
    assert found.status_code == 400
    assert found.json()["error"]["param"].startswith("messages.0.content.0")


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
def test_large_bodies_that_are_wrong_are_refused_at_once(
    running: tuple[Any, str], body: dict[str, Any]
) -> None:
    found = httpx.post(f"{running[1]}/v1/completions", json=body, timeout=60)
    assert found.status_code == 400 and len(found.content) < 2000


def test_an_error_behind_the_beginning_is_the_servers(
    running: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(going: Any, logits: Any) -> list[Exception]:
        return [ValueError("what nobody is to know")] * len(going)

    monkeypatch.setattr("kvant.engine.engine.sample_tokens", fails)
    found = httpx.post(f"{running[1]}/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
    assert found.status_code == 500
    error = found.json()["error"]
    assert (error["message"], error["type"]) == ("the request failed", "server_error")


def test_a_body_of_another_type_is_refused(running: tuple[Any, str]) -> None:
    """What a page of somebody else may send without asking."""
    headers = {"Content-Type": "text/plain"}
    found = httpx.post(f"{running[1]}/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert found.status_code == 400
    assert "Content-Type: application/json" in found.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_sequence(running: tuple[Any, str], stream: bool) -> None:
    service, url = running
    settled(service)
    before = service.engine.stats()
    asked = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    with httpx.Client() as client:
        request = client.build_request("POST", f"{url}/v1/completions", json=asked)
        if stream:
            response = client.send(request, stream=True)
            next(response.iter_text())
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{url}/v1/completions", json=asked, timeout=0.3)
    until = time.monotonic() + 30
    while service.engine.stats()["cancelled"] == before["cancelled"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    told = settled(service)
    assert told["cancelled"] == before["cancelled"] + 1
    assert told["completion_tokens"] - before["completion_tokens"] < 400


def test_a_full_house_is_told_when_to_come_back(inside: tuple[Any, Any]) -> None:
    with served(*inside, max_sequences=1, max_waiting=1) as (_, url):
        asked = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}

        def ask(_: int) -> httpx.Response:
            return httpx.post(f"{url}/v1/completions", json=asked, timeout=60)

        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(ask, range(6)))
        told = [one.status_code for one in found]
        assert told.count(200) >= 2 and told.count(429) >= 1 and {*told} == {200, 429}
        refused = next(one for one in found if one.status_code == 429)
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert ask(0).status_code == 200


def test_keys_and_what_keeps_their_owners_apart(inside: tuple[Any, Any]) -> None:
    keys = ApiKeys(["first-key", "second-key"], "secret")
    with served(*inside, keys=keys) as (_, url):
        prompt = PROMPT * 20

        def ask(key: str | None) -> httpx.Response:
            headers = {} if key is None else {"Authorization": f"Bearer {key}".strip()}
            asked = {"prompt": prompt, "max_tokens": 2}
            return httpx.post(f"{url}/v1/completions", json=asked, headers=headers)

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


def test_a_page_under_another_name_may_not_ask(running: tuple[Any, str]) -> None:
    found = httpx.get(f"{running[1]}/v1/models", headers={"Host": "evil.example"})
    assert found.status_code == 400


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
        with pytest.raises(ValueError, match="only the word 'admin' and a space") as caught:
            parse_keys(None, wrong)
        assert "first-key" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "example.org"])
def test_another_address_needs_keys(host: str) -> None:
    with pytest.raises(ValueError, match="without keys: anybody could ask"):
        check_host(host, 0)
    check_host(host, 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_the_machine_itself_does_not(host: str) -> None:
    check_host(host, 0)


def test_a_prompt_that_cannot_fit_names_its_bytes(inside: tuple[Any, Any]) -> None:
    with served(*inside, max_bytes="600KiB", max_sequences=2) as (_, url):
        asked = {"prompt": PROMPT * 30, "max_tokens": 200}
        found = httpx.post(f"{url}/v1/completions", json=asked)
        assert found.status_code == 400
        assert "of a limit of 600" in found.json()["error"]["message"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def begun(*words: str) -> tuple[subprocess.Popen[str], str]:
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


def test_the_command_ends_tidily_and_keeps_prefixes_in_a_store(tmp_path: Path) -> None:
    store, asked = str(tmp_path / "kept"), {"prompt": PROMPT * 30, "max_tokens": 200}
    for restored in (False, True):
        process, url = begun("--store", store)
        answers: list[httpx.Response] = []

        def ask(url: str = url, answers: list[httpx.Response] = answers, **more: Any) -> None:
            body = asked | {"ignore_eos": True} | more
            answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))

        ask(max_tokens=2)
        details = answers[0].json()["usage"]["prompt_tokens_details"]
        assert (details["restored_tokens"] > 0) == restored
        under_way = threading.Thread(target=ask)
        under_way.start()
        until = time.monotonic() + 30
        while not httpx.get(f"{url}/v1/stats").json()["running"]:
            assert time.monotonic() < until
        process.send_signal(signal.SIGTERM)
        under_way.join(60)
        assert answers[1].status_code == 200  # what was asked for is answered
        assert answers[1].json()["usage"]["completion_tokens"] == 200
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out, error) == (0, "", "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_during_the_start_ends_it_tidily(name: str) -> None:
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
def test_a_signal_before_any_import_ends_a_start_tidily(name: str) -> None:
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
