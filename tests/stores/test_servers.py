"""Stores on real servers: what is theirs alone, and what happens when the server dies."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant.errors import BlobError, StoreError
from kvant.stores import (
    Blob,
    BlobPayload,
    FolderStore,
    ObjectStore,
    RedisStore,
    Store,
    Tiers,
    open_store,
)
from kvant.stores import tiers as module
from kvant.stores.redis import DEFAULT_TTL_S
from kvant.stores.tiers import CIRCUIT_OPEN_S, MAX_FAILURES_IN_A_ROW
from stores.servers import PASSWORD, QUOTED, Server, redis_server, s3_server

PAGE = "ab/" + "0" * 64


def blob(page: str = PAGE) -> Blob:
    return Blob(page, "k0-1", PAGE, (1, 2), BlobPayload.from_fields({"0/keys": torch.ones(3)}))


def client(server: Server) -> Any:
    import redis

    return redis.Redis.from_url(server.url, decode_responses=True)


def test_a_page_is_a_hash_that_lives_a_week(redis: Server) -> None:
    store, asked = open_store(redis.url), client(redis)
    store.put(PAGE, "k0-1", b"x")
    store.put(PAGE, "a-0123456789abcdef-64", b"y")
    key = f"kvant:{PAGE}"
    assert asked.hgetall(key) == {"k0-1": "x", "a-0123456789abcdef-64": "y"}
    assert DEFAULT_TTL_S - 1000 < asked.ttl(key) <= DEFAULT_TTL_S
    asked.expire(key, 50)
    assert store.get(PAGE, "k0-1") == b"x" and asked.ttl(key) > 1000  # it was used
    asked.expire(key, 50)
    assert store.has([PAGE]) and asked.ttl(key) <= 50
    store.drop(PAGE, "k0-1")
    store.drop(PAGE, "a-0123456789abcdef-64")
    assert not asked.exists(key)


def test_a_time_to_live_of_ones_own(redis: Server) -> None:
    store, asked = open_store(f"{redis.url}?ttl=60"), client(redis)
    store.put(PAGE, "k0-9", b"x")
    assert 0 < asked.ttl(f"kvant:{PAGE}") <= 60
    store.drop(PAGE, "k0-9")


def test_many_pages_are_one_question(redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from redis.client import Pipeline

    store, sent = open_store(redis.url), []
    execute = Pipeline.execute
    monkeypatch.setattr(Pipeline, "execute", lambda self: sent.append(1) or execute(self))
    assert store.has([f"ab/{number:064}" for number in range(200)]) == [frozenset()] * 200
    assert sent == [1]


def test_keys_of_others_are_no_blobs(redis: Server) -> None:
    store, asked = open_store(redis.url), client(redis)
    asked.set(f"kvant:{PAGE}", "a word")
    tiers = Tiers([store])
    assert tiers.has([PAGE]) == [frozenset()] and tiers.get(PAGE, "k0-1") is None
    tiers.put(blob())
    assert tiers.stats()["stores"][0]["errors"] == 3
    asked.delete(f"kvant:{PAGE}")
    asked.hset(f"kvant:{PAGE}", mapping={"k0-1": "x", "../k0": "x", "": "x"})
    assert store.has([PAGE]) == [{"k0-1"}]
    asked.delete(f"kvant:{PAGE}")


def test_a_password_is_in_no_word_of_ours(redis: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = redis.url.replace(QUOTED, "geheim")
    for url, written in ((redis.url, 1), (wrong, 0)):
        tiers = Tiers([open_store(url)])
        for number in range(MAX_FAILURES_IN_A_ROW):
            tiers.put(blob(f"password/{number:064}"))
        (stats,) = tiers.stats()["stores"]
        assert (stats["written"], stats["rests"]) == (written * MAX_FAILURES_IN_A_ROW, 1 - written)
        told = json.dumps(tiers.stats()) + caplog.text
        assert not any(word in told for word in ("geheim", PASSWORD, QUOTED))
    assert "rests for 30 seconds" in caplog.text


def test_a_server_that_dies_is_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with redis_server() as server:
        dies(open_store(server.url), server, monkeypatch)
        near, far = FolderStore(tmp_path, min_free=0), open_store(server.url)
        tiers = Tiers([near, far])
        tiers.put(blob())
        assert tiers.get(PAGE, "k0-1") is not None  # the folder has it


def test_an_object_store_that_dies_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        dies(open_store(server.url), server, monkeypatch)


def dies(store: Store, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    tiers = Tiers([store])
    tiers.put(blob())
    assert tiers.has([PAGE]) == [{"k0-1"}] and tiers.get(PAGE, "k0-1") is not None
    server.kill()
    for _ in range(MAX_FAILURES_IN_A_ROW):
        assert tiers.get(PAGE, "k0-1") is None
    assert tiers.has([PAGE, PAGE]) == [frozenset()] * 2
    tiers.put(blob())
    (stats,) = tiers.stats()["stores"]
    assert (stats["errors"], stats["rests"], stats["skipped"]) == (MAX_FAILURES_IN_A_ROW, 1, 2)
    clock.now += CIRCUIT_OPEN_S
    assert tiers.has([PAGE]) == [frozenset()]
    assert tiers.stats()["stores"][0]["rests"] == 2


def test_a_redis_that_comes_back_is_used_again(redis: Server) -> None:
    store = open_store(redis.url)
    store.put(PAGE, "k0-1", b"x")
    client(redis).client_kill_filter(skipme=False, _type="normal")  # as a restart does
    assert store.get(PAGE, "k0-1") == b"x"
    store.drop(PAGE, "k0-1")


def test_objects_lie_below_their_prefix(s3: Server) -> None:
    store, above = open_store(s3.url), open_store("s3://bucket")
    assert isinstance(store, ObjectStore) and isinstance(above, ObjectStore)
    store.put(PAGE, "k0-1", b"x")
    found = store._obstore.list(above._bucket).collect()
    assert [one["path"] for one in found] == [f"some/prefix/{PAGE}/k0-1"]
    assert above.has([PAGE]) == [frozenset()]
    store.drop(PAGE, "k0-1")


def test_a_bucket_that_there_is_not(s3: Server) -> None:
    store = open_store("s3://nothing/here")
    with pytest.raises(StoreError, match=r"^s3://nothing/here: ") as refused:
        store.put(PAGE, "k0-1", b"x")
    assert "\n" not in str(refused.value) and PASSWORD not in str(refused.value)
    tiers = Tiers([store])
    assert tiers.has([PAGE]) == [frozenset()] and tiers.get(PAGE, "k0-1") is None


def test_a_blob_beyond_all_bounds_is_not_read(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvant.stores import contract

    store = open_store(s3.url)
    store.put(PAGE, "k0-1", bytes(1001))
    monkeypatch.setattr(contract, "MAX_BLOB_BYTES", 1000)
    with pytest.raises(BlobError, match="1001 bytes, 1000 at most"):
        store.get(PAGE, "k0-1")
    store.drop(PAGE, "k0-1")


def test_a_redis_is_what_it_says(redis: Server) -> None:
    store = open_store(redis.url)
    assert isinstance(store, RedisStore)
    assert store.url == redis.url.replace(f":{QUOTED}@", "")
