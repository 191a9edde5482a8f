"""The router: integers alone, so the laws of it are of any number of servers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvant.serve.routing import KEY_DEPTHS, PrefixRouter, make_keys

ORDERS = ("in turn", "one after the other", "at random")


def pages(prefix: str, count: int, own: str = "") -> list[bytes]:
    """`count` pages that all who begin so have, and one that only this request has."""
    return [f"{prefix} {number}".encode() for number in range(count)] + [own.encode()]


def router(*servers: str) -> PrefixRouter[str]:
    made = PrefixRouter[str]()
    for server in servers:
        made.add_server(server)
    return made


def ask(made: PrefixRouter[str], read: list[bytes], *, ends: bool = True) -> str:
    named = make_keys(read)
    server = made.rank_servers(named, len(read))[0]
    made.assign_request(server, named)
    made.start_request(server)
    if ends:
        made.finish_request(server)
    return server


def many(order: str, seed: int) -> list[tuple[int, int]]:
    """20 requests behind each of 12 prefixes."""
    asked = [(prefix, number) for prefix in range(12) for number in range(20)]
    if order == "in turn":
        asked.sort(key=lambda one: one[1])
    if order == "at random":
        random.Random(seed).shuffle(asked)
    return asked


def test_keys_are_of_the_first_pages_and_of_the_salt() -> None:
    short, long = pages("a", 4, "x"), pages("a", 20, "y")
    assert len(make_keys(short)) == 2 and len(make_keys(long)) == 3
    assert make_keys(short) == make_keys(long)[:2]
    assert not set(make_keys(long)) & set(make_keys(long, b"somebody else"))
    assert make_keys([b"ab", b"c"])[0] == make_keys([b"ab", b"d"])[0] != make_keys([b"a", b"bc"])[0]
    assert len(make_keys(pages("a", 1000))) == len(KEY_DEPTHS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ends", [True, False], ids=["answered", "under way"])
@pytest.mark.parametrize("seed", range(20))
def test_requests_go_where_their_prefix_is_and_no_server_has_more_than_its_part(
    order: str, ends: bool, seed: int
) -> None:
    made, homes, arrived = router(f"a{seed}", f"b{seed}"), dict[int, str](), 0
    load = Counter[str]()
    for prefix, number in many(order, seed):
        server = ask(made, pages(f"{seed} {prefix}", 16, str(number)), ends=ends)
        arrived += homes.setdefault(prefix, server) == server
        load[server] += 1
    assert arrived >= 0.95 * 240
    assert max(load.values()) <= 1.25 * 240 / 2


def test_a_prefix_that_all_ask_for_is_read_in_several_places() -> None:
    made = router(*"abcd")
    load = Counter(ask(made, pages("hot", 16, str(number)), ends=False) for number in range(400))
    assert max(load.values()) <= 2 * 100 and len(load) > 1


def test_what_little_all_share_draws_nobody() -> None:
    made = router(*"abcd")
    load = Counter(ask(made, pages("system", 1) + pages(str(number), 60)) for number in range(400))
    assert max(load.values()) <= 1.25 * 100


def test_who_joins_is_given_its_part_and_nothing_else_moves() -> None:
    made, homes = router(*"abc"), dict[int, str]()
    for prefix in range(300):
        homes[prefix] = ask(made, pages(str(prefix), 16))
    made.add_server("d")
    assert all(ask(made, pages(str(prefix), 16, "again")) == homes[prefix] for prefix in homes)
    new = Counter(ask(made, pages(f"new {prefix}", 16)) for prefix in range(400))
    assert 60 <= new["d"] <= 1.25 * 100


def test_who_joins_is_asked_where_all_begin_alike() -> None:
    made = router(*"abc")
    for number in range(300):
        ask(made, pages("system", 1) + pages(str(number), 60))
    made.add_server("d")
    load = Counter(
        ask(made, pages("system", 1) + pages(f"new {number}", 60)) for number in range(400)
    )
    assert 50 <= load["d"] <= 1.25 * 100


def test_who_leaves_is_asked_no_more_and_the_others_take_its_part() -> None:
    made = router(*"abcd")
    homes = {prefix: ask(made, pages(str(prefix), 16)) for prefix in range(400)}
    made.remove_server("b")
    after = {prefix: ask(made, pages(str(prefix), 16, "again")) for prefix in homes}
    stayed = [prefix for prefix, home in homes.items() if home != "b"]
    assert "b" not in after.values()
    assert sum(after[prefix] == homes[prefix] for prefix in stayed) >= 0.95 * len(stayed)
    assert max(Counter(after.values()).values()) <= 1.3 * 400 / 3
    made.finish_request("b")  # of a request that ended with it


def test_two_routers_that_know_nothing_choose_alike() -> None:
    one, other = router(*"abcdef"), router(*"fedcba")
    agreed = 0
    for prefix in range(100):
        agreed += ask(one, pages(str(prefix), 4)) == ask(other, pages(str(prefix), 4))
    assert agreed >= 90


def test_a_router_that_begins_anew_is_told_by_the_servers() -> None:
    before, homes = router(*"abc"), dict[int, str]()
    held: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
    for prefix in range(60):
        homes[prefix] = ask(before, pages(str(prefix), 16))
        held[homes[prefix]] += make_keys(pages(str(prefix), 16))
    after = router(*"cab")
    for server, of_it in held.items():
        after.add_keys(server, of_it)
    for prefix, home in homes.items():
        assert ask(after, pages(str(prefix), 16, "again")) == home


def test_what_is_known_is_bounded() -> None:
    made = PrefixRouter[str](max_keys=100)
    made.add_server("a"), made.add_server("b")
    for prefix in range(1000):
        ask(made, pages(str(prefix), 16))
    assert len(made._servers_by_key) <= 100
    assert made.rank_servers([], 0) and PrefixRouter[str]().rank_servers([], 0) == []


def test_counts_do_not_run_over() -> None:
    made = router("a", "b")
    for _ in range(200_000):
        made.assign_request("a", ())
        made.start_request("a")
        made.finish_request("a")
    assert 0 < made.loads[0] < 400
