"""Test the router: integers only, so its laws hold for any number of servers."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import product

import pytest

from kvant.bench.agent_sessions import SESSIONS, SessionSize, make_session
from kvant.prefixes.tree import count_shared_prefix
from kvant.serve.routing import (
    KEY_DEPTHS,
    MAX_KEY_DEPTH,
    PrefixRouter,
    RoutedRequest,
    make_keys,
    parse_prefix_pages,
)
from thin import thin_rows

ORDERS = ("in turn", "one after the other", "at random")


def make_pages(prefix: str, count: int, suffix: str = "") -> list[bytes]:
    """Return `count` pages shared by this prefix, and one unique page."""
    return [f"{prefix} {number}".encode() for number in range(count)] + [suffix.encode()]


def make_router(*servers: str) -> PrefixRouter[str]:
    prefix_router = PrefixRouter[str]()
    for server in servers:
        prefix_router.add_server(server)
    return prefix_router


def route_request(prefix_router: PrefixRouter[str], read: list[bytes], *, ends: bool = True) -> str:
    named = make_keys(read)
    server = prefix_router.rank_servers(named, len(read))[0]
    prefix_router.assign_request(server, named)
    prefix_router.start_request(server)
    if ends:
        prefix_router.finish_request(server)
    return server


def make_requests(order: str, seed: int) -> list[tuple[int, int]]:
    """Return 20 requests for each of 12 prefixes."""
    requests = [(prefix, number) for prefix in range(12) for number in range(20)]
    if order == "in turn":
        requests.sort(key=lambda request: request[1])
    if order == "at random":
        random.Random(seed).shuffle(requests)
    return requests


def test_keys_depend_on_the_first_pages_and_the_salt() -> None:
    short, long = make_pages("a", 4, "x"), make_pages("a", 20, "y")
    assert KEY_DEPTHS[:6] == (1, 2, 3, 4, 5, 6) and KEY_DEPTHS[-1] == MAX_KEY_DEPTH
    assert len(make_keys(short)) == sum(depth <= 5 for depth in KEY_DEPTHS)
    assert make_keys(short)[:4] == make_keys(long)[:4]
    assert make_keys(short)[4] != make_keys(long)[4]
    assert not set(make_keys(long)) & set(make_keys(long, b"somebody else"))
    assert make_keys([b"ab", b"c"])[0] == make_keys([b"ab", b"d"])[0] != make_keys([b"a", b"bc"])[0]
    assert len(make_keys(make_pages("a", 5000))) == len(KEY_DEPTHS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ends", [True, False], ids=["answered", "under way"])
@pytest.mark.parametrize("seed", range(20))
def test_requests_follow_their_prefix_within_the_load_limit(
    order: str, ends: bool, seed: int
) -> None:
    prefix_router, homes, arrived = make_router(f"a{seed}", f"b{seed}"), dict[int, str](), 0
    load = Counter[str]()
    for prefix, number in make_requests(order, seed):
        server = route_request(
            prefix_router, make_pages(f"{seed} {prefix}", 16, str(number)), ends=ends
        )
        arrived += homes.setdefault(prefix, server) == server
        load[server] += 1
    assert arrived >= 0.95 * 240
    assert max(load.values()) <= 1.25 * 240 / 2


AGENT_SIZES = {
    "short": SessionSize(),
    "long": SessionSize(num_turns=20, num_tools=16, system_words=8000, result_words=200),
}


@pytest.mark.parametrize(("size", "num_servers"), thin_rows(product(AGENT_SIZES, [2, 4])))
def test_requests_of_agents_follow_their_session(size: str, num_servers: int) -> None:
    """Also if all begin with the same long system text, which every server has read."""
    servers, rng = [f"s{number}" for number in range(num_servers)], random.Random(1)
    prefix_router, load, followed = make_router(*servers), Counter[str](), []
    sessions = [
        iter(make_session(kind, AGENT_SIZES[size], seed))
        for seed in range(num_servers)
        for kind in SESSIONS
    ]
    read_by_server: dict[str, list[list[bytes]]] = {server: [] for server in servers}
    while sessions:
        session = rng.choice(sessions)
        if (request := next(session, None)) is None:
            sessions.remove(session)
            continue
        body = json.dumps(request.body).encode()
        routed, (_, pages) = RoutedRequest.from_scope({}, body, ""), parse_prefix_pages(body)
        chosen = prefix_router.rank_servers(routed.page_keys, routed.num_pages)[0]
        prefix_router.assign_request(chosen, routed.page_keys)
        shared = {
            server: max((count_shared_prefix(other, pages) for other in read), default=0)
            for server, read in read_by_server.items()
        }
        if longest := max(shared.values()):
            followed.append(shared[chosen] >= 0.95 * longest)
        read_by_server[chosen].append(pages)
        load[chosen] += 1
    assert followed.count(True) >= 0.95 * len(followed)
    assert max(load.values()) <= 1.5 * sum(load.values()) / num_servers


def test_popular_prefix_is_replicated() -> None:
    prefix_router = make_router(*"abcd")
    load = Counter(
        route_request(prefix_router, make_pages("hot", 16, str(number)), ends=False)
        for number in range(400)
    )
    assert max(load.values()) <= 2 * 100 and len(load) > 1


def test_short_common_prefix_attracts_no_requests() -> None:
    prefix_router = make_router(*"abcd")
    load = Counter(
        route_request(prefix_router, make_pages("system", 1) + make_pages(str(number), 60))
        for number in range(400)
    )
    assert max(load.values()) <= 1.25 * 100


def test_new_server_gets_its_share_and_nothing_else_moves() -> None:
    prefix_router, homes = make_router(*"abc"), dict[int, str]()
    for prefix in range(300):
        homes[prefix] = route_request(prefix_router, make_pages(str(prefix), 16))
    prefix_router.add_server("d")
    assert all(
        route_request(prefix_router, make_pages(str(prefix), 16, "again")) == homes[prefix]
        for prefix in homes
    )
    new = Counter(
        route_request(prefix_router, make_pages(f"new {prefix}", 16)) for prefix in range(400)
    )
    assert 60 <= new["d"] <= 1.25 * 100


def test_new_server_is_used_when_all_prompts_start_alike() -> None:
    prefix_router = make_router(*"abc")
    for number in range(300):
        route_request(prefix_router, make_pages("system", 1) + make_pages(str(number), 60))
    prefix_router.add_server("d")
    load = Counter(
        route_request(prefix_router, make_pages("system", 1) + make_pages(f"new {number}", 60))
        for number in range(400)
    )
    assert 50 <= load["d"] <= 1.25 * 100


def test_removed_server_is_not_used_and_the_others_get_its_share() -> None:
    prefix_router = make_router(*"abcd")
    homes = {
        prefix: route_request(prefix_router, make_pages(str(prefix), 16)) for prefix in range(400)
    }
    prefix_router.remove_server("b")
    after = {
        prefix: route_request(prefix_router, make_pages(str(prefix), 16, "again"))
        for prefix in homes
    }
    stayed = [prefix for prefix, home in homes.items() if home != "b"]
    assert "b" not in after.values()
    assert sum(after[prefix] == homes[prefix] for prefix in stayed) >= 0.95 * len(stayed)
    assert max(Counter(after.values()).values()) <= 1.3 * 400 / 3
    prefix_router.finish_request("b")  # for a request that ended with it


def test_two_routers_without_shared_state_choose_alike() -> None:
    first, second = make_router(*"abcdef"), make_router(*"fedcba")
    agreed = 0
    for prefix in range(100):
        agreed += route_request(first, make_pages(str(prefix), 4)) == route_request(
            second, make_pages(str(prefix), 4)
        )
    assert agreed >= 90


def test_restarted_router_learns_from_the_servers() -> None:
    before, homes = make_router(*"abc"), dict[int, str]()
    pages_by_server: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
    for prefix in range(60):
        homes[prefix] = route_request(before, make_pages(str(prefix), 16))
        pages_by_server[homes[prefix]] += make_keys(make_pages(str(prefix), 16))
    after = make_router(*"cab")
    for server, of_it in pages_by_server.items():
        after.add_keys(server, of_it)
    for prefix, home in homes.items():
        assert route_request(after, make_pages(str(prefix), 16, "again")) == home


def test_routing_table_is_bounded() -> None:
    prefix_router = PrefixRouter[str](max_keys=100)
    prefix_router.add_server("a"), prefix_router.add_server("b")
    for prefix in range(1000):
        route_request(prefix_router, make_pages(str(prefix), 16))
    assert len(prefix_router._servers_by_key) <= 100
    assert prefix_router.rank_servers([], 0) and PrefixRouter[str]().rank_servers([], 0) == []


def test_counters_do_not_overflow() -> None:
    prefix_router = make_router("a", "b")
    for _ in range(200_000):
        prefix_router.assign_request("a", ())
        prefix_router.start_request("a")
        prefix_router.finish_request("a")
    assert 0 < prefix_router.loads[0] < 400


def test_embeddings_have_no_keys() -> None:
    """They share no prefix, so they go where the load is low."""
    body = json.dumps({"input": "a" * 5000, "model": "m"}).encode()
    keys = {
        path: RoutedRequest.from_scope({"path": path}, body, "").page_keys
        for path in ("/v1/embeddings", "/api/embed", "/v1/responses")
    }
    assert keys.pop("/v1/responses") and not any(keys.values())


def test_adapters_share_no_keys() -> None:
    """Only names of adapters count: the model's own name may be left out."""
    keys = {
        (model, salt): RoutedRequest.from_scope(
            {},
            json.dumps({"prompt": "a" * 5000, "model": model, "cache_salt": salt}).encode(),
            "",
            ("poet", "lawyer"),
        ).page_keys
        for model in (None, "inside", "poet", "lawyer")
        for salt in (None, "s")
    }
    assert keys[None, None] == keys["inside", None] and len({*keys.values()}) == 6


def test_replicas_get_the_traceparent() -> None:
    headers = [(b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
    scope = {"type": "http", "path": "/v1/completions", "headers": headers, "app": object()}
    request = RoutedRequest.from_scope(scope, b"", "")
    assert request.scope == {name: scope[name] for name in ("type", "path", "headers")}
