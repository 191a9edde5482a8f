"""Test stores on real servers: their specifics, and a server that dies."""

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
from kvant.stores.remote import DEFAULT_TTL_S
from kvant.stores.tiers import CIRCUIT_OPEN_S, MAX_FAILURES_IN_A_ROW
from stores.servers import PASSWORD, QUOTED, Server, redis_server, s3_server

PAGE = "ab/" + "0" * 64


def make_blob(page: str = PAGE) -> Blob:
    return Blob(page, "k0-1", PAGE, (1, 2), BlobPayload.from_fields({"0/keys": torch.ones(3)}))


def connect_redis(server: Server) -> Any:
    import redis

    return redis.Redis.from_url(server.url, decode_responses=True)


def test_page_is_a_hash_that_expires_after_a_week(redis: Server) -> None:
    store, redis_client = open_store(redis.url), connect_redis(redis)
    store.put(PAGE, "k0-1", b"x")
    store.put(PAGE, "a-0123456789abcdef-64", b"y")
    key = f"kvant:{PAGE}"
    assert redis_client.hgetall(key) == {"k0-1": "x", "a-0123456789abcdef-64": "y"}
    assert DEFAULT_TTL_S - 1000 < redis_client.ttl(key) <= DEFAULT_TTL_S
    redis_client.expire(key, 50)
    assert store.get(PAGE, "k0-1") == b"x" and redis_client.ttl(key) > 1000  # it was used
    redis_client.expire(key, 50)
    assert store.has([PAGE]) and redis_client.ttl(key) <= 50
    store.drop(PAGE, "k0-1")
    store.drop(PAGE, "a-0123456789abcdef-64")
    assert not redis_client.exists(key)


def test_time_to_live_can_be_set(redis: Server) -> None:
    store, redis_client = open_store(f"{redis.url}?ttl=60"), connect_redis(redis)
    store.put(PAGE, "k0-9", b"x")
    assert 0 < redis_client.ttl(f"kvant:{PAGE}") <= 60
    store.drop(PAGE, "k0-9")


def test_many_pages_are_one_round_trip(redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from redis.client import Pipeline

    store, sent = open_store(redis.url), []
    execute = Pipeline.execute
    monkeypatch.setattr(
        Pipeline, "execute", lambda self, **options: sent.append(1) or execute(self, **options)
    )
    assert store.has([f"ab/{number:064}" for number in range(200)]) == [frozenset()] * 200
    assert sent == [1]


def test_foreign_keys_are_no_blobs(redis: Server) -> None:
    store, redis_client = open_store(redis.url), connect_redis(redis)
    redis_client.set(f"kvant:{PAGE}", "a word")
    tiers = Tiers([store])
    others = f"ab/{1:064}"
    store.put(others, "k0-2", b"x")
    assert tiers.has([PAGE, others]) == [frozenset(), {"k0-2"}]
    assert tiers.get(PAGE, "k0-1") is None
    assert tiers.put(make_blob()) and tiers.has([PAGE]) == [{"k0-1"}]  # the foreign key is replaced
    assert tiers.stats()["stores"][0]["errors"] == 0
    redis_client.delete(f"kvant:{PAGE}", f"kvant:{others}")
    redis_client.hset(f"kvant:{PAGE}", mapping={"k0-1": "x", "../k0": "x", "": "x", b"\xff": "x"})
    assert store.has([PAGE]) == [{"k0-1"}]
    redis_client.delete(f"kvant:{PAGE}")


def test_messages_never_contain_a_password(redis: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = redis.url.replace(QUOTED, "geheim")
    for url, num_written in ((redis.url, 1), (wrong, 0)):
        tiers = Tiers([open_store(url)])
        for number in range(MAX_FAILURES_IN_A_ROW):
            tiers.put(make_blob(f"password/{number:064}"))
        (stats,) = tiers.stats()["stores"]
        assert (stats["written"], stats["rests"]) == (
            num_written * MAX_FAILURES_IN_A_ROW,
            1 - num_written,
        )
        all_text = json.dumps(tiers.stats()) + caplog.text
        assert not any(word in all_text for word in ("geheim", PASSWORD, QUOTED))
    assert "skipped for 30 seconds" in caplog.text


def test_dead_server_is_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with redis_server() as server:
        check_dead_server(open_store(server.url), server, monkeypatch)
        near, far = FolderStore(tmp_path, min_free=0), open_store(server.url)
        tiers = Tiers([near, far])
        tiers.put(make_blob())
        assert tiers.get(PAGE, "k0-1") is not None  # the folder has it


def test_dead_object_store_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        check_dead_server(open_store(server.url), server, monkeypatch)


def check_dead_server(store: Store, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    tiers = Tiers([store])
    tiers.put(make_blob())
    assert tiers.has([PAGE]) == [{"k0-1"}] and tiers.get(PAGE, "k0-1") is not None
    server.kill()
    for _ in range(MAX_FAILURES_IN_A_ROW):
        assert tiers.get(PAGE, "k0-1") is None
    assert tiers.has([PAGE, PAGE]) == [frozenset()] * 2
    tiers.put(make_blob())
    (stats,) = tiers.stats()["stores"]
    assert (stats["errors"], stats["rests"], stats["skipped"]) == (MAX_FAILURES_IN_A_ROW, 1, 2)
    clock.now += CIRCUIT_OPEN_S
    assert tiers.has([PAGE]) == [frozenset()]
    assert tiers.stats()["stores"][0]["rests"] == 2


def test_recovered_redis_is_used_again(redis: Server) -> None:
    store = open_store(redis.url)
    store.put(PAGE, "k0-1", b"x")
    connect_redis(redis).client_kill_filter(skipme=False, _type="normal")  # like a restart
    assert store.get(PAGE, "k0-1") == b"x"
    store.drop(PAGE, "k0-1")


def test_objects_have_their_prefix(s3: Server) -> None:
    store, above = open_store(s3.url), open_store("s3://bucket")
    assert isinstance(store, ObjectStore) and isinstance(above, ObjectStore)
    store.put(PAGE, "k0-1", b"x")
    objects = store._obstore.list(above._bucket).collect()
    assert [entry["path"] for entry in objects] == [f"some/prefix/{PAGE}/k0-1"]
    assert above.has([PAGE]) == [frozenset()]
    store.drop(PAGE, "k0-1")


def test_missing_bucket_is_refused(s3: Server) -> None:
    store = open_store("s3://nothing/here")
    with pytest.raises(StoreError, match=r"^s3://nothing/here: ") as refused:
        store.put(PAGE, "k0-1", b"x")
    assert "\n" not in str(refused.value) and PASSWORD not in str(refused.value)
    tiers = Tiers([store])
    assert tiers.has([PAGE]) == [frozenset()] and tiers.get(PAGE, "k0-1") is None


def test_oversized_blob_is_not_read(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvant.stores import contract

    store = open_store(s3.url)
    store.put(PAGE, "k0-1", bytes(1001))
    monkeypatch.setattr(contract, "MAX_BLOB_BYTES", 1000)
    with pytest.raises(BlobError, match="1001 bytes, 1000 at most"):
        store.get(PAGE, "k0-1")
    store.drop(PAGE, "k0-1")


def test_redis_describes_itself(redis: Server) -> None:
    store = open_store(redis.url)
    assert isinstance(store, RedisStore)
    assert store.url == redis.url.replace(f":{QUOTED}@", "")
