"""Replicas on Ray Serve: where requests arrive, and what one of them leaves to the others."""

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
    app,
    choose_num_replicas,
)
from kvant.serve.routed_request import PAGE_BYTES, RoutedRequest, parse_prefix_pages

pytestmark = pytest.mark.xdist_group("ray")  # one deployment for all
PREFIXES, EACH = 12, 20


class Answer(NamedTuple):
    status: int
    replica: str
    told: Any


def asked(root: str, method: str, path: str, body: Any = None) -> Answer:
    connection = http.client.HTTPConnection(urlsplit(root).netloc, timeout=60)
    try:
        text = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        told = json.loads(answer.read())
        return Answer(answer.status, answer.headers.get(REPLICA_HEADER.decode(), ""), told)
    finally:
        connection.close()


def stored(root: str) -> Any:
    """What one of the replicas, in turn, says of its store."""
    return asked(root, "GET", "/v1/stats").told["prefixes"]["store"]


def written(root: str) -> bool:
    """Have both replicas written all that is to be?"""
    told = [asked(root, "GET", "/v1/stats") for _ in range(12)]
    waiting = {one.replica: one.told["prefixes"]["store"]["nbytes_waiting"] for one in told}
    return len(waiting) == 2 and not any(waiting.values())


def prefix(seed: str, number: int) -> str:
    """A thousand tokens that nobody else has."""
    draw = random.Random(f"{seed} {number}")
    return "".join(f"value_{draw.randrange(10**6)} = {draw.randrange(10**6)}\n" for _ in range(100))


def one(root: str, seed: str, number: int, question: int) -> Answer:
    prompt = prefix(seed, number) + f"# {question}\n"
    return asked(root, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 4})


def many(seed: str) -> list[tuple[int, int]]:
    """Every first question first, by several clients; then all others, as they come."""
    rest = [(number, question) for number in range(PREFIXES) for question in range(1, EACH)]
    random.Random(seed).shuffle(rest)
    return [(number, 0) for number in range(PREFIXES)] + rest


def test_requests_arrive_where_their_prefix_is(deployment: str) -> None:
    with ThreadPoolExecutor(4) as clients:
        numbers = many("arrive")
        answers = list(clients.map(lambda asked: one(deployment, "arrive", *asked), numbers))
    assert {answer.status for answer in answers} == {200}
    homes = {number: answers[number].replica for number in range(PREFIXES)}
    there = sum(
        homes[number] == answer.replica
        for (number, _), answer in zip(numbers, answers, strict=True)
    )
    load = Counter(answer.replica for answer in answers)
    assert there >= 0.95 * PREFIXES * EACH
    assert max(load.values()) <= 1.25 * PREFIXES * EACH / 2, load


@pytest.mark.laws  # what is restored is chosen by how busy the machine is
def test_a_replica_that_dies_leaves_its_pages_to_the_others(deployment: str) -> None:
    while not written(deployment):  # what other tests left
        time.sleep(0.1)
    numbers = many("dies")
    answers: dict[tuple[int, int], Answer] = {}
    half = threading.Barrier(2)

    def ask(place: int) -> None:
        if place == len(numbers) // 2:
            half.wait(60)
        answers[numbers[place]] = one(deployment, "dies", *numbers[place])

    with ThreadPoolExecutor(4) as clients:
        done = clients.map(ask, range(len(numbers)))
        half.wait(60)
        killed = answers[0, 0].replica
        ray.kill(ray.get_actor(f"SERVE_REPLICA::kvant#replica#{killed}", namespace="serve"))
        list(done)
    assert len(answers) == len(numbers) and {a.status for a in answers.values()} == {200}
    homes = {number: answers[number, 0].replica for number in range(PREFIXES)}
    stats = stored(deployment)
    whole = restored = 0
    for number in (number for number, home in homes.items() if home == killed):
        mine = [answers[number, question] for question in range(EACH)]
        moved = [answer.told["usage"] for answer in mine if answer.replica != killed]
        assert moved
        whole += min(usage["prompt_tokens"] for usage in moved) // 64 * 64
        restored += max(usage["prompt_tokens_details"]["restored_tokens"] for usage in moved)
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
    assert one(deployment, "after", 0, 0).status == 200


@pytest.mark.laws  # what replicas had is told every ten seconds
def test_a_front_that_begins_anew_is_told_where_things_are(deployment: str) -> None:
    homes = {number: one(deployment, "front", number, 0).replica for number in range(PREFIXES)}
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
                answer = one(deployment, "front", number, 1)
                if answer.status == 200:
                    break
            time.sleep(0.5)
        assert answer.replica == home


def test_a_client_that_goes_away_is_not_served_on(deployment: str) -> None:
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
        told = [asked(deployment, "GET", "/v1/stats").told for _ in range(4)]
        if not any(one["running"] for one in told):
            return
    raise AssertionError(told)


def test_what_is_wrong_is_said_as_by_one_server(deployment: str) -> None:
    unknown = asked(deployment, "POST", "/v1/completions", {"prompt": "a", "nothing": 1})
    assert unknown.status == 400 and unknown.told["error"]["param"] == "nothing"
    assert asked(deployment, "POST", "/v1/completions", b"{").status == 400
    large = asked(deployment, "POST", "/v1/completions", b" " * ((4 << 20) + 1))
    assert large.status == 413 and "4194304 bytes" in large.told["error"]["message"]
    assert asked(deployment, "GET", "/nowhere").status == 404


# ---- without a cluster


def test_pages_are_of_what_a_prompt_begins_with() -> None:
    system = {"role": "system", "content": "x" * 1000}
    first = {"messages": [system, {"role": "user", "content": "a"}], "temperature": 1}
    other = {"temperature": 0, "messages": [system, {"role": "user", "content": "b" * 600}]}
    short, long = (parse_prefix_pages(json.dumps(one).encode())[1] for one in (first, other))
    assert len(short) == 1000 // PAGE_BYTES + 1 and len(long) > len(short)
    assert short[:3] == long[:3]
    assert parse_prefix_pages(json.dumps({"prompt": list(range(200))}).encode())[1]
    assert parse_prefix_pages(json.dumps({"tools": [1] * 200} | first).encode())[1][0] != short[0]
    for nothing in (b"", b"[]", b"\xff", b"{", b'{"prompt": null}', b'{"prompt": "short"}'):
        assert parse_prefix_pages(nothing) == (None, [])
    assert (
        parse_prefix_pages(b"[" * 100_000)
        == parse_prefix_pages(b'{"prompt":' * 100_000)
        == (None, [])
    )


def test_keys_are_of_who_shares_prefixes() -> None:
    body = {"prompt": "x" * 1000}
    scope = {"type": "http", "path": "/", "headers": []}

    def named(tenant: str, **more: Any) -> tuple[bytes, ...]:
        return RoutedRequest.from_scope(scope, json.dumps(body | more).encode(), tenant).page_keys

    assert len(named("")) == 1 and named("") == named("", temperature=1)
    assert len({named(""), named("a"), named("a", cache_salt="b"), named("a", cache_salt="c")}) == 4


class Config(NamedTuple):
    target_ongoing_requests: float = 4


class Context(NamedTuple):
    total_num_requests: float
    aggregated_metrics: Any
    config: Config = Config()


def test_it_grows_with_requests_and_with_bytes() -> None:
    assert choose_num_replicas(Context(9, {}))[0] == 9 / 4
    assert choose_num_replicas(Context(0, None))[0] == 0
    assert choose_num_replicas(Context(1, {"used": {"a": 0.9, "b": 0.9}}))[0] == pytest.approx(2)
    assert choose_num_replicas(Context(1, {"used": {"a": 1.0, "b": 1.0}}))[0] > 2


def test_the_example_is_an_application() -> None:
    told = yaml.safe_load((Path(__file__).parents[2] / "docs" / "serve.yaml").read_text())
    (one,) = ServeDeploySchema.model_validate(told).applications
    assert one.import_path == f"{app.__module__}:{app.__name__}"
    assert isinstance(app(one.args), serve.Application)
    assert DeploymentSettings(store="a").store == DeploymentSettings(store=["a"]).store == ["a"]


def test_a_deployment_is_checked_before_anything_is_begun() -> None:
    with pytest.raises(SpecError):
        app(DeploymentSettings(kv_cache="affine9000"))
    with pytest.raises(ValueError, match="nothing"):
        app({"nothing": 1})
