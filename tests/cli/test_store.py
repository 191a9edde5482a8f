"""Test `kvant store` as installed: listing, verification and deletion."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvant.stores import Blob, BlobPayload, FolderStore, Tiers

DAY = 86_400.0
ONE, OTHER = "a" * 16, "b" * 16
PARTS = ((1, "k0-1"), (1, "k1-1"), (2, "k0-2"), (2, "a-0123456789abcdef-128"))
COMMANDS = ("ls", "stats", "verify", "prune --older-than 1")


def page_key(space: str, number: int) -> str:
    return f"{space}/{number:064x}"


def make_filled_store(path: Path, secret: bytes | None = None, model: str = "llama") -> FolderStore:
    """Store six blobs in two namespaces, last used 0 to 5 days ago."""
    store = FolderStore(path, min_free=0)
    tiers = Tiers([store], secret)
    listed = [*((ONE, *part) for part in PARTS), (OTHER, 1, "k0-1"), (OTHER, 2, "k0-2")]
    for days, (space, number, part) in enumerate(listed):
        metadata = {"model": model, "spec": "affine8"} if space == ONE else {}
        rows = {"0/keys": torch.ones(1000)}
        tiers.put(
            Blob(
                page_key(space, number),
                part,
                page_key(space, 0),
                (1,),
                BlobPayload.from_fields(rows),
                metadata=metadata,
            )
        )
        timestamp = time.time() - days * DAY
        os.utime(blob_path(store, page_key(space, number), part), (timestamp, timestamp))
    return store


def blob_path(store: FolderStore, name: str, part: str) -> Path:
    space, _, key = name.partition("/")
    return store.path / space / key[:2] / key[2:] / part


def damage(store: FolderStore, name: str, part: str) -> None:
    path = blob_path(store, name, part)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return make_filled_store(tmp_path / "store")


def list_blobs(store: FolderStore) -> set[tuple[str, str]]:
    return {(entry.page, entry.part) for entry in store}


def test_list_prints_one_line_per_namespace(call: Any, store: FolderStore) -> None:
    code, out, error = call("store", "ls", str(store.path))
    assert (code, error) == (0, "")
    heads, first, second = (line.split() for line in out.splitlines())
    assert heads == ["namespace", "model", "spec", "pages", "anchors", "bytes", "last", "use"]
    assert first[:5] == [ONE, "llama", "affine8", "2", "1"]
    assert second[:5] == [OTHER, "unknown", "unknown", "2", "0"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", first[-1])
    assert not re.search(r"\x1b", out)


def test_list_prints_every_blob(call: Any, store: FolderStore) -> None:
    code, out, _ = call("store", "ls", str(store.path), "--pages")
    assert code == 0
    for entry in store:
        assert re.search(rf"{entry.page} +{entry.part} ", out)


def test_list_prints_json(call: Any, store: FolderStore) -> None:
    before = sorted(store)
    _, out, _ = call("store", "ls", str(store.path), "--json")
    report = json.loads(out)
    assert report["store"] == str(store.path) and "blobs" not in report
    first, second = report["namespaces"]
    assert (first["model"], first["spec"], first["pages"], first["anchors"]) == (
        "llama",
        "affine8",
        2,
        1,
    )
    assert (second["model"], second["spec"], second["pages"], second["anchors"]) == (
        None,
        None,
        2,
        0,
    )
    assert first["nbytes"] + second["nbytes"] == sum(entry.nbytes for entry in store)
    _, out, _ = call("store", "ls", str(store.path), "--pages", "--json")
    assert [(first["page"], first["part"]) for first in json.loads(out)["blobs"]] == [
        (entry.page, entry.part) for entry in before
    ]
    assert sorted(store) == before  # reading counts as no use


def test_blob_metadata_is_escaped_for_terminals(call: Any, tmp_path: Path) -> None:
    make_filled_store(tmp_path, model="\x1b]0;x\x07[red]\n" + "x" * 1000)
    _, out, _ = call("store", "ls", str(tmp_path))
    assert "?]0;x?[red]?xxx" in out and "\x1b" not in out and len(out.splitlines()) == 3


def test_list_prints_totals(call: Any, store: FolderStore) -> None:
    code, out, _ = call("store", "stats", str(store.path), "--json")
    report = json.loads(out)
    assert code == 0 and report["nbytes_free"] > 0
    assert [report[name] for name in ("namespaces", "pages", "anchors", "blobs")] == [2, 4, 1, 6]
    assert report["nbytes"] == sum(entry.nbytes for entry in store)
    assert report["first_used"] < report["last_used"]
    _, out, _ = call("store", "stats", str(store.path))
    assert "blobs: 6\n" in out and re.search(r"nbytes: \d+(\.\d+)? KiB\n", out)


@pytest.mark.parametrize("command", COMMANDS)
def test_empty_store_is_listed(command: str, call: Any, tmp_path: Path) -> None:
    name, *words = command.split()
    code, out, error = call("store", name, str(tmp_path), *words)
    assert (code, error) == (0, "") and out
    code, out, _ = call("store", name, str(tmp_path), *words, "--json")
    assert code == 0 and json.loads(out)["store"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("secret", [None, b"a secret"])
def test_corrupt_blobs_are_reported(secret: bytes | None, call: Any, tmp_path: Path) -> None:
    store = make_filled_store(tmp_path / "store", secret)
    key = tmp_path / "key"
    key.write_bytes((secret or b"none") + b"\n")
    words = [str(store.path), *(["--secret-file", str(key)] if secret else [])]
    code, out, error = call("store", "verify", *words)
    assert (code, error) == (0, "") and re.fullmatch(r"6 blobs, \d.* KiB: all intact\n", out)
    before = sorted(store)
    damage(store, page_key(ONE, 2), "k0-2")
    blob_path(store, page_key(OTHER, 1), "k0-1").write_bytes(
        blob_path(store, page_key(ONE, 1), "k0-1").read_bytes()
    )
    code, out, error = call("store", "verify", *words)
    assert (code, error) == (1, "")
    assert f"{page_key(ONE, 2)} k0-2: its checksum does not match: damaged, or" in out
    assert f"{page_key(OTHER, 1)} k0-1: it belongs to {page_key(ONE, 1)} k0-1\n" in out
    assert re.search(r"\n6 blobs, .*, 2 corrupt\n", out)
    code, out, _ = call("store", "verify", *words, "--json")
    report = json.loads(out)
    assert (code, report["blobs"], report["dropped"]) == (1, 6, 0)
    assert [blob["page"] for blob in report["damaged"]] == [page_key(ONE, 2), page_key(OTHER, 1)]
    assert len(list_blobs(store)) == 6
    code, out, _ = call("store", "verify", *words, "--drop")
    assert code == 0 and out.endswith("2 corrupt, now deleted\n")
    assert len(list_blobs(store)) == 4
    # reading counts as no use
    assert [entry for entry in before if entry in sorted(store)] == sorted(store)
    code, out, _ = call("store", "verify", *words, "--drop", "--json")
    assert (code, json.loads(out)["damaged"], json.loads(out)["dropped"]) == (0, [], 0)


def test_pipe_in_place_of_a_blob_is_corrupt(call: Any, store: FolderStore) -> None:
    path = blob_path(store, page_key(ONE, 2), "k0-2")
    path.unlink()
    os.mkfifo(path)
    assert call("store", "ls", str(store.path))[0] == 0
    assert call("store", "stats", str(store.path))[0] == 0
    code, out, _ = call("store", "verify", str(store.path))
    assert code == 1 and "prw-r--r--, a regular file is needed" in out
    code, out, _ = call("store", "verify", str(store.path), "--drop")
    assert code == 0 and not path.exists()


@pytest.mark.parametrize("options", [(), ("--pages",)])
def test_empty_store_is_listed_in_one_line(
    options: tuple[str, ...], call: Any, tmp_path: Path
) -> None:
    code, out, _ = call("store", "ls", str(tmp_path), *options)
    assert (code, out) == (0, f"{tmp_path}: the store is empty\n")


def test_pipe_in_place_of_a_blob_is_evicted_first(call: Any, store: FolderStore) -> None:
    path = blob_path(store, page_key(ONE, 2), "k0-2")
    path.unlink()
    for entry in store:  # used two minutes before the pipe
        os.utime(blob_path(store, entry.page, entry.part), (time.time() - 120,) * 2)
    os.mkfifo(path)
    assert call("store", "prune", str(store.path), "--max-bytes", "0")[0] == 0
    assert list_blobs(store) == set()


def test_missing_secret_deletes_nothing(call: Any, tmp_path: Path) -> None:
    store = make_filled_store(tmp_path, b"a secret")
    assert call("store", "verify", str(tmp_path))[0] == 1
    code, out, error = call("store", "verify", str(tmp_path), "--drop")
    assert (code, out) == (2, "") and "--secret-file" in error and error.count("\n") == 1
    assert len(list_blobs(store)) == 6


@pytest.mark.parametrize("text", [None, "", "\n"])
def test_unreadable_secret_is_refused(
    text: str | None, call: Any, store: FolderStore, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "key").write_text(text)
    words = ("--secret-file", str(tmp_path / "key"))
    code, out, error = call("store", "verify", str(store.path), *words)
    assert (code, out) == (2, "") and error.startswith("error: --secret-file ")


def test_old_blobs_are_deleted(call: Any, store: FolderStore) -> None:
    code, out, error = call("store", "prune", str(store.path), "--older-than", "2.5")
    assert (code, error) == (0, "") and re.match(r"deleted: 3 blobs, .* KiB; .* KiB left\n", out)
    assert list_blobs(store) == {(page_key(ONE, number), part) for number, part in PARTS[:3]}
    code, out, _ = call("store", "prune", str(store.path), "--older-than", "2.5", "--json")
    report = json.loads(out)
    assert (code, report["blobs"], report["nbytes"]) == (0, 0, 0)
    assert report["nbytes_left"] == sum(entry.nbytes for entry in store)


def test_blobs_beyond_the_size_limit_are_deleted(call: Any, store: FolderStore) -> None:
    size = max(entry.nbytes for entry in store)
    code, out, _ = call("store", "prune", str(store.path), "--max-bytes", str(2 * size), "--json")
    assert code == 0 and json.loads(out)["blobs"] == 4
    assert list_blobs(store) == {(page_key(ONE, number), part) for number, part in PARTS[:2]}


def test_namespace_is_deleted(call: Any, store: FolderStore) -> None:
    code, out, _ = call("store", "prune", str(store.path), "--namespace", ONE)
    assert code == 0 and f" of {ONE}; 0 B left\n" in out
    assert {name for name, _ in list_blobs(store)} == {page_key(OTHER, 1), page_key(OTHER, 2)}


def test_limits_apply_within_a_namespace(call: Any, store: FolderStore) -> None:
    size = max(entry.nbytes for entry in store)
    words = ["--namespace", ONE, "--older-than", "2.5", "--max-bytes", str(2 * size)]
    code, out, _ = call("store", "prune", str(store.path), *words, "--json")
    assert (code, json.loads(out)["blobs"]) == (0, 2)
    expected = {(page_key(ONE, number), part) for number, part in PARTS[:2]}
    assert list_blobs(store) == {
        *expected,
        (page_key(OTHER, 1), "k0-1"),
        (page_key(OTHER, 2), "k0-2"),
    }


def test_files_of_killed_writers_are_deleted(call: Any, store: FolderStore) -> None:
    half = blob_path(store, page_key(ONE, 1), f"{1:016x}.part")
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    _, out, _ = call("store", "prune", str(store.path), "--older-than", "100")
    assert "deleted: 1 unfinished files of killed writers\n" in out and not half.exists()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--namespace", "c" * 16),
        ("--max-bytes", "many"),
        ("--older-than", "-1"),
        ("--older-than", "x"),
    ],
)
def test_prune_without_a_criterion_is_refused(
    words: tuple[str, ...], call: Any, store: FolderStore
) -> None:
    code, out, error = call("store", "prune", str(store.path), *words)
    assert (code, out) == (2, "") and error.startswith("error: ")
    assert len(list_blobs(store)) == 6


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no such folder"),
        ("nowhere/deep", "no such folder"),
        ("file", "a folder is needed"),
        ("others", "not a kvant store"),
        ("redis://:geheim@host", "a folder is needed"),
    ],
)
def test_folder_that_is_no_store_is_refused(
    command: str,
    name: str,
    message: str,
    call: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("others/photos/holiday").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    verb, *words = command.split()
    code, out, error = call("store", verb, name, *words)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: .*{message}.*\n", error) and "geheim" not in error
    assert sorted(tmp_path.rglob("*")) == before
