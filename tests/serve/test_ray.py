"""Test replicas on Ray Serve: routing of requests, and failure of a replica."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import yaml

pytest.importorskip("ray", reason="pip install 'kvant[ray]'")

import ray
from ray import serve
from ray.serve.schema import ServeDeploySchema

from kvant.errors import SpecError
from kvant.serve.ray import (
    REPLICA_HEADER,
    STATS_PERIOD_S,
    DeploymentSettings,
    EngineReplica,
    app,
    choose_num_replicas,
)
from kvant.serve.routing import PAGE_BYTES, RoutedRequest, parse_prefix_pages
from kvant.server import ApiKeys
from kvant.server.errors import make_error
from kvant.server.response_writers import format_stream_error
from kvant.server.settings import read_authorization
from serve.conftest import NAME

pytestmark = pytest.mark.xdist_group("ray")  # one deployment for all
PREFIXES, EACH = 12, 20
MESSAGES = [{"role": "user", "content": "import os"}]


class Answer(NamedTuple):
    status: int
    replica: str
    body: Any


def send(root: str, method: str, path: str, body: Any = None) -> Answer:
    connection = http.client.HTTPConnection(urlsplit(root).netloc, timeout=60)
    try:
        text = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        payload = json.loads(answer.read())
        return Answer(answer.status, answer.headers.get(REPLICA_HEADER.decode(), ""), payload)
    finally:
        connection.close()


def read_store_stats(root: str) -> Any:
    """Return the store statistics of the next replica in rotation."""
    return send(root, "GET", "/v1/stats").body["prefixes"]["store"]


def all_written(root: str) -> bool:
    """Whether both replicas have written all queued blobs."""
    responses = [send(root, "GET", "/v1/stats") for _ in range(12)]
    waiting = {
        answer.replica: answer.body["prefixes"]["store"]["nbytes_waiting"] for answer in responses
    }
    return len(waiting) == 2 and not any(waiting.values())


def make_prefix(seed: str, number: int) -> str:
    """Return a unique text of a thousand tokens."""
    draw = random.Random(f"{seed} {number}")
    return "".join(f"value_{draw.randrange(10**6)} = {draw.randrange(10**6)}\n" for _ in range(100))


def send_question(root: str, seed: str, number: int, question: int) -> Answer:
    prompt = make_prefix(seed, number) + f"# {question}\n"
    return send(root, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 4})


def send_all(seed: str) -> list[tuple[int, int]]:
    """Send every first question with several clients, then all others in order."""
    rest = [(number, question) for number in range(PREFIXES) for question in range(1, EACH)]
    random.Random(seed).shuffle(rest)
    return [(number, 0) for number in range(PREFIXES)] + rest


def test_requests_reach_the_replica_with_their_prefix(deployment: str) -> None:
    with ThreadPoolExecutor(4) as clients:
        numbers = send_all("arrive")
        answers = list(
            clients.map(lambda number: send_question(deployment, "arrive", *number), numbers)
        )
    assert {answer.status for answer in answers} == {200}
    homes = {number: answers[number].replica for number in range(PREFIXES)}
    num_hits = sum(
        homes[number] == answer.replica
        for (number, _), answer in zip(numbers, answers, strict=True)
    )
    load = Counter(answer.replica for answer in answers)
    assert num_hits >= 0.95 * PREFIXES * EACH
    assert max(load.values()) <= 1.25 * PREFIXES * EACH / 2, load


@pytest.mark.laws  # slow
def test_pages_of_a_failed_replica_are_reassigned(deployment: str) -> None:
    numbers = send_all("dies")
    responses: dict[tuple[int, int], Answer] = {}
    num_clients, middle = 4, len(numbers) // 2
    half = threading.Barrier(num_clients + 1)

    def ask(place: int) -> None:
        if middle <= place < middle + num_clients:  # one question of each client
            half.wait(600)
            half.wait(600)
        responses[numbers[place]] = send_question(deployment, "dies", *numbers[place])

    with ThreadPoolExecutor(num_clients) as clients:
        results = clients.map(ask, range(len(numbers)))
        try:
            half.wait(600)
            deadline = time.monotonic() + 500
            while not all_written(deployment):  # what is not written is lost with its replica
                assert time.monotonic() < deadline
                time.sleep(0.1)
            killed = responses[numbers[middle][0], 0].replica  # the home of a question that follows
            actor = ray.get_actor(f"SERVE_REPLICA::kvant#replica#{killed}", namespace="serve")
            half.wait(60)
            ray.kill(actor)  # while it answers
        except BaseException:
            half.abort()
            raise
        list(results)
    assert len(responses) == len(numbers) and {a.status for a in responses.values()} == {200}
    homes = {number: responses[number, 0].replica for number in range(PREFIXES)}
    stats = read_store_stats(deployment)
    whole = restored = 0
    for number in (number for number, home in homes.items() if home == killed):
        chat_answers = [responses[number, question] for question in range(EACH)]
        usages = [answer.body["usage"] for answer in chat_answers if answer.replica != killed]
        assert usages
        whole += min(usage["prompt_tokens"] for usage in usages) // 64 * 64
        restored += max(usage["prompt_tokens_details"]["restored_tokens"] for usage in usages)
    assert whole and restored >= 0.9 * whole, (restored, whole, stats)


def test_a_stream_whose_replica_dies_ends_with_an_error(deployment: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(deployment).netloc, timeout=60)
    body = {"prompt": "def f(", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: {")
    replica = answer.headers[REPLICA_HEADER.decode()]
    ray.kill(ray.get_actor(f"SERVE_REPLICA::kvant#replica#{replica}", namespace="serve"))
    events = [line for line in answer if line.startswith(b"data: ")]
    connection.close()
    assert json.loads(events[-1][6:])["error"]["type"] == "server_error"
    assert send_question(deployment, "after", 0, 0).status == 200


@pytest.mark.laws  # replicas report their pages every ten seconds
def test_restarted_proxy_learns_the_page_locations(deployment: str) -> None:
    homes = {
        number: send_question(deployment, "front", number, 0).replica for number in range(PREFIXES)
    }
    time.sleep(STATS_PERIOD_S + 2)
    (front,) = (
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("SERVE_REPLICA::kvant#front#")
    )
    ray.kill(ray.get_actor(front, namespace="serve"))
    for number, home in homes.items():
        for _ in range(60):
            with suppress(OSError, ValueError, http.client.HTTPException):
                answer = send_question(deployment, "front", number, 1)
                if answer.status == 200:
                    break
            time.sleep(0.5)
        assert answer.replica == home


def test_request_of_a_disconnected_client_is_cancelled(deployment: str) -> None:
    for _ in range(3):
        connection = http.client.HTTPConnection(urlsplit(deployment).netloc, timeout=60)
        body = {"prompt": "def g(", "max_tokens": 1900, "stream": True, "ignore_eos": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        answer.readline()
        connection.close()
    for _ in range(100):
        stats_list = [send(deployment, "GET", "/v1/stats").body for _ in range(4)]
        if not any(stats["running"] for stats in stats_list):
            return
    raise AssertionError(stats_list)


def test_errors_equal_those_of_a_single_server(deployment: str) -> None:
    unknown = send(deployment, "POST", "/v1/completions", {"prompt": "a", "nothing": 1})
    assert unknown.status == 400 and unknown.body["error"]["param"] == "nothing"
    assert send(deployment, "POST", "/v1/completions", b"{").status == 400
    large = send(deployment, "POST", "/v1/completions", b" " * ((32 << 20) + 1))
    assert large.status == 413 and "33554432 bytes" in large.body["error"]["message"]
    assert send(deployment, "GET", "/nowhere").status == 404


# ---- without a cluster


def test_pages_depend_on_the_start_of_a_prompt() -> None:
    system = {"role": "system", "content": "x" * 1000}
    first = {"messages": [system, {"role": "user", "content": "a"}], "temperature": 1}
    other = {"temperature": 0, "messages": [system, {"role": "user", "content": "b" * 600}]}
    short, long = (parse_prefix_pages(json.dumps(body).encode())[1] for body in (first, other))
    assert len(short) == 1000 // PAGE_BYTES + 1 and len(long) > len(short)
    assert short[:3] == long[:3]
    assert parse_prefix_pages(json.dumps({"prompt": list(range(200))}).encode())[1]
    assert parse_prefix_pages(json.dumps({"tools": [1] * 200} | first).encode())[1][0] != short[0]
    accounted = [
        parse_prefix_pages(json.dumps({"system": text} | first).encode())
        for line in ("x-anthropic-billing-header: cch=a;", "x-anthropic-billing-header: cch=b;")
        for text in (f"{line}\n" + "Be brief. " * 50, [{"type": "text", "text": line}, "Hi " * 200])
    ]
    assert accounted[:2] == accounted[2:] and accounted[0] != accounted[1]
    for nothing in (b"", b"[]", b"\xff", b"{", b'{"prompt": null}', b'{"prompt": "short"}'):
        assert parse_prefix_pages(nothing) == (None, [])
    assert (
        parse_prefix_pages(b"[" * 100_000)
        == parse_prefix_pages(b'{"prompt":' * 100_000)
        == (None, [])
    )


def test_keys_depend_on_the_prefix_namespace() -> None:
    body = {"prompt": "x" * 1000}
    scope = {"type": "http", "path": "/", "headers": []}

    def name_pages(tenant: str, **more: Any) -> tuple[bytes, ...]:
        return RoutedRequest.from_scope(scope, json.dumps(body | more).encode(), tenant).page_keys

    assert len(name_pages("")) == 3 and name_pages("") == name_pages("", temperature=1)
    assert (
        len(
            {
                name_pages(""),
                name_pages("a"),
                name_pages("a", cache_salt="b"),
                name_pages("a", cache_salt="c"),
            }
        )
        == 4
    )


class Config(NamedTuple):
    target_ongoing_requests: float = 4


class Context(NamedTuple):
    total_num_requests: float
    aggregated_metrics: Any
    config: Config = Config()


def test_autoscaling_follows_requests_and_bytes() -> None:
    assert choose_num_replicas(Context(9, {}))[0] == 9 / 4
    assert choose_num_replicas(Context(0, None))[0] == 0
    assert choose_num_replicas(Context(1, {"used": {"a": 0.9, "b": 0.9}}))[0] == pytest.approx(2)
    assert choose_num_replicas(Context(1, {"used": {"a": 1.0, "b": 1.0}}))[0] > 2


def test_example_is_a_serve_application() -> None:
    config = yaml.safe_load((Path(__file__).parents[2] / "docs" / "serve.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == f"{app.__module__}:{app.__name__}"
    assert isinstance(app(application.args), serve.Application)
    assert DeploymentSettings(store="a").store == DeploymentSettings(store=["a"]).store == ["a"]


def test_replica_of_a_pruned_format_has_no_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it could not start."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    settings = DeploymentSettings(
        kv_cache="affine8,prune=snapkv:50%", guard=False, max_bytes="64MiB", pack=False
    )
    settings.check()
    replica = EngineReplica(settings, ApiKeys())
    assert replica.record_autoscaling_stats() == {"used": 0.0}


def test_deployment_is_validated_before_it_starts() -> None:
    with pytest.raises(SpecError):
        app(DeploymentSettings(kv_cache="affine9000"))
    with pytest.raises(ValueError, match="nothing"):
        app({"nothing": 1})


def test_replicas_serve_all_apis(deployment: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"model": NAME, "max_tokens": 2, "messages": MESSAGES},
        "/api/chat": {"model": NAME, "messages": MESSAGES, "options": {"num_predict": 2}},
    }
    for path, body in bodies.items():
        whole = send(deployment, "POST", path, body | {"stream": False})
        assert whole.status == 200 and whole.replica, whole.body
    refused = send(deployment, "POST", "/v1/messages", {"model": NAME})
    assert (refused.status, refused.body["type"]) == (400, "error")


def test_a_broken_stream_ends_with_an_error_of_its_api() -> None:
    body = make_error("it died", "server_error")
    assert format_stream_error("/v1/chat/completions", body).startswith('data: {"error"')
    event, data = format_stream_error("/v1/messages", body).strip().split("\n")
    assert event == "event: error" and json.loads(data[6:])["error"]["type"] == "api_error"
    assert json.loads(format_stream_error("/api/chat", body)) == {"error": "it died"}


def test_keys_are_read_from_either_header() -> None:
    assert read_authorization({"authorization": "Bearer a", "x-api-key": "b"}) == "Bearer a"
    assert read_authorization({"authorization": "", "x-api-key": "b"}) == "Bearer b"
    assert read_authorization({}) == "Bearer "
