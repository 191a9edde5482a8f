"""Test opening a store by its URL: valid ones open, all others are refused at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvant.errors import CacheError, StoreError
from kvant.stores import STORE_TYPES, FolderStore, ObjectStore, RedisStore, open_store, open_tiers
from kvant.stores.remote import DEFAULT_TTL_S

SECRET = "geheim"
NEEDED = "az://, file://, gs://, memory://, redis://, rediss://, s3://, unix://, valkey://"

REDIS = {  # expected host or path, port, number, time to live
    "redis://host": ("host", 6379, 0, DEFAULT_TTL_S),
    "redis://host/": ("host", 6379, 0, DEFAULT_TTL_S),
    "redis://host:7000/3?ttl=60": ("host", 7000, 3, 60),
    "rediss://somebody:geheim@host:7000": ("host", 7000, 0, DEFAULT_TTL_S),
    "valkey://:geheim@host/1": ("host", 6379, 1, DEFAULT_TTL_S),
    "redis://[::1]:7000": ("::1", 7000, 0, DEFAULT_TTL_S),
    "unix:///run/redis.sock": ("/run/redis.sock", None, 0, DEFAULT_TTL_S),
    "unix://:geheim@/run/redis.sock?db=2&ttl=60": ("/run/redis.sock", None, 2, 60),
}
NO_REDIS = (
    *("redis://", "redis:///0", "redis://:geheim@", "redis://host:0", "redis://host:port"),
    *("redis://host:70000", "redis://host/number", "redis://host/-1", "redis://host/0/1"),
    *("redis://host?ttl=0", "redis://host?ttl=-1", "redis://host?ttl=7d", "redis://host?ttl"),
    *("redis://host?ttl=1&ttl=2", "redis://host?password=geheim", "redis://host?db=1"),
    *("redis://host#geheim", "redis://:ge/heim@host", "redis://:geheim?@host", "unix://host/path"),
    *("unix://", "unix:///path?socket_timeout=100", "valkey://host?protocol=3"),
)
NO_OBJECTS = (
    *("s3://", "s3:///prefix", "s3://bucket?region=x", "s3://somebody:geheim@bucket/prefix"),
    *("s3://bucket/prefix#geheim", "gs://buck et", "az://", "memory://name", "memory:///name"),
)
NO_STORES = (
    *("ftp://host", "http://somebody:geheim@host/path", "Redis://host", "s3a://bucket"),
    *("redis:host", "s3:/bucket/prefix", "memory:", "reddis://:geheim@host/0"),
)


@pytest.mark.parametrize("url", REDIS)
def test_redis_opens_by_url(url: str) -> None:
    pytest.importorskip("redis")
    store = open_store(url)
    assert isinstance(store, RedisStore)
    options = store._client.connection_pool.connection_kwargs
    host, port, number, ttl = REDIS[url]
    assert (
        options.get("host", options.get("path")),
        options.get("port", 6379 if port else None),
    ) == (
        host,
        port,
    )
    assert (options.get("db", 0), store.ttl) == (number, ttl)
    assert options.get("password") == (SECRET if SECRET in url else None)
    assert (options["socket_connect_timeout"], options["socket_timeout"]) == (1.0, 5.0)
    assert (
        options["retry"].get_retries() == 0
    )  # otherwise a dead server would cost four times as much
    assert SECRET not in store.url and "@" not in store.url and "?" not in store.url
    assert host in store.url


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/a/b", "gs://bucket/a", "memory://"])
def test_object_store_opens_by_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    store = open_store(url)
    assert isinstance(store, ObjectStore) and store.url == url


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreError, match=r"^az://container/a: .*Account must be specified$"):
        open_store("az://container/a")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "somebody")
    assert open_store("az://container/a").url == "az://container/a"


@pytest.mark.parametrize("url", [*NO_REDIS, *NO_OBJECTS, *NO_STORES])
def test_invalid_url_is_refused_without_its_password(url: str) -> None:
    scheme = url.partition(":")[0]
    if scheme in ("redis", "unix", "valkey") and url in NO_REDIS:
        pytest.importorskip("redis")
        allowed = r"redis://\[user:password@\]host\[:port\]\[/db\]"
    elif url in NO_OBJECTS:
        pytest.importorskip("obstore")
        allowed = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix and memory://"
    else:
        allowed = f"{NEEDED} or a folder is needed"
    with pytest.raises(StoreError, match=allowed) as refused:
        open_store(url)
    assert not any(word in str(refused.value) for word in (SECRET, "heim"))
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "missing", "extra"),
    [("redis://:geheim@host", "redis", "redis"), ("s3://bucket", "obstore", "object")],
)
def test_missing_library_names_what_to_install(
    url: str, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(StoreError, match=rf"pip install 'kvant\[{extra}\]'") as refused:
        open_store(url)
    assert SECRET not in str(refused.value)


def test_folder_opens_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("store", "~/store", str(tmp_path / "store"), f"file://{tmp_path}/store"):
        store = open_store(name, max_bytes="1KiB")
        assert isinstance(store, FolderStore)
        assert (store.path, store.max_bytes) == (tmp_path / "store", 1024)
    assert open_store(tmp_path / "store").url == str(tmp_path / "store")
    assert open_store("file:///a%20b").url == "/a b"
    assert open_store("a:b").url == str(tmp_path / "a:b")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "url", ["file:a", "file://host/path", "file://", "file:///path?x", "file:///path#x"]
)
def test_folder_not_expressible_as_a_file_url(url: str) -> None:
    with pytest.raises(StoreError, match="file:///path is allowed"):
        open_store(url)


def test_empty_name_is_refused() -> None:
    with pytest.raises(StoreError, match="a store without a name"):
        open_store("")


def test_several_stores_become_tiers(tmp_path: Path) -> None:
    folder_store = FolderStore(tmp_path / "mine")
    tiers = open_tiers([str(tmp_path / "a"), folder_store, tmp_path / "b"], b"secret", "1KiB")
    stores = [guarded.store for guarded in tiers.stores]
    assert [store.url for store in stores] == [str(tmp_path / name) for name in ("a", "mine", "b")]
    assert [getattr(store, "max_bytes", 0) for store in stores] == [1024, None, 1024]
    assert tiers.secret == b"secret"
    for name in (
        tmp_path / "a",
        str(tmp_path / "a"),
        FolderStore(tmp_path / "a"),
        (tmp_path / "a",),
    ):
        assert [guarded.store.url for guarded in open_tiers(name).stores] == [str(tmp_path / "a")]
    with pytest.raises(CacheError, match="no stores"):
        open_tiers([])


def test_size_limit_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="max_bytes is for folders"):
        open_store("redis://host", max_bytes="1GB")
    with pytest.raises(StoreError, match="no folder is named"):
        open_tiers(FolderStore(tmp_path), max_bytes=1000)
    pytest.importorskip("redis")
    tiers = open_tiers([tmp_path, "redis://host"], max_bytes=1000)
    assert [guarded.store.url for guarded in tiers.stores] == [str(tmp_path), "redis://host"]


def test_every_scheme_has_a_store() -> None:
    assert {*STORE_TYPES, "file"} == {word.removesuffix("://") for word in NEEDED.split(", ")}
