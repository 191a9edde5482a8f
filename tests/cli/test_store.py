"""`kvant store`, as it is installed: what lies in a folder, whether it is right, and what goes."""

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


def page(space: str, number: int) -> str:
    return f"{space}/{number:064x}"


def filled(path: Path, secret: bytes | None = None, model: str = "llama") -> FolderStore:
    """Six blobs in two namespaces, which were used 0 to 5 days ago."""
    store = FolderStore(path, min_free=0)
    tiers = Tiers([store], secret)
    listed = [*((ONE, *one) for one in PARTS), (OTHER, 1, "k0-1"), (OTHER, 2, "k0-2")]
    for days, (space, number, part) in enumerate(listed):
        told = {"model": model, "spec": "affine8"} if space == ONE else {}
        rows = {"0/keys": torch.ones(1000)}
        tiers.put(
            Blob(
                page(space, number),
                part,
                page(space, 0),
                (1,),
                BlobPayload.from_fields(rows),
                metadata=told,
            )
        )
        then = time.time() - days * DAY
        os.utime(file(store, page(space, number), part), (then, then))
    return store


def file(store: FolderStore, name: str, part: str) -> Path:
    space, _, key = name.partition("/")
    return store.path / space / key[:2] / key[2:] / part


def damage(store: FolderStore, name: str, part: str) -> None:
    path = file(store, name, part)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return filled(tmp_path / "store")


def left(store: FolderStore) -> set[tuple[str, str]]:
    return {(entry.page, entry.part) for entry in store}


def test_a_line_a_namespace(call: Any, store: FolderStore) -> None:
    code, out, error = call("store", "ls", str(store.path))
    assert (code, error) == (0, "")
    heads, first, second = (line.split() for line in out.splitlines())
    assert heads == ["namespace", "model", "spec", "pages", "anchors", "bytes", "last", "use"]
    assert first[:5] == [ONE, "llama", "affine8", "2", "1"]
    assert second[:7] == [OTHER, "not", "told", "not", "told", "2", "0"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", first[-1])
    assert not re.search(r"\x1b", out)


def test_every_blob(call: Any, store: FolderStore) -> None:
    code, out, _ = call("store", "ls", str(store.path), "--pages")
    assert code == 0
    for entry in store:
        assert re.search(rf"{entry.page} +{entry.part} ", out)


def test_a_list_as_json(call: Any, store: FolderStore) -> None:
    before = sorted(store)
    _, out, _ = call("store", "ls", str(store.path), "--json")
    told = json.loads(out)
    assert told["store"] == str(store.path) and "blobs" not in told
    one, other = told["namespaces"]
    assert (one["model"], one["spec"], one["pages"], one["anchors"]) == ("llama", "affine8", 2, 1)
    assert (other["model"], other["spec"], other["pages"], other["anchors"]) == (None, None, 2, 0)
    assert one["nbytes"] + other["nbytes"] == sum(entry.nbytes for entry in store)
    _, out, _ = call("store", "ls", str(store.path), "--pages", "--json")
    assert [(one["page"], one["part"]) for one in json.loads(out)["blobs"]] == [
        (entry.page, entry.part) for entry in before
    ]
    assert sorted(store) == before  # nothing was used


def test_what_a_blob_says_does_nothing_to_a_terminal(call: Any, tmp_path: Path) -> None:
    filled(tmp_path, model="\x1b]0;x\x07[red]\n" + "x" * 1000)
    _, out, _ = call("store", "ls", str(tmp_path))
    assert "?]0;x?[red]?xxx" in out and "\x1b" not in out and len(out.splitlines()) == 3


def test_all_together(call: Any, store: FolderStore) -> None:
    code, out, _ = call("store", "stats", str(store.path), "--json")
    told = json.loads(out)
    assert code == 0 and told["nbytes_free"] > 0
    assert [told[name] for name in ("namespaces", "pages", "anchors", "blobs")] == [2, 4, 1, 6]
    assert told["nbytes"] == sum(entry.nbytes for entry in store)
    assert told["first_used"] < told["last_used"]
    _, out, _ = call("store", "stats", str(store.path))
    assert "blobs: 6\n" in out and re.search(r"nbytes: \d+(\.\d+)? KiB\n", out)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_store(command: str, call: Any, tmp_path: Path) -> None:
    name, *words = command.split()
    code, out, error = call("store", name, str(tmp_path), *words)
    assert (code, error) == (0, "") and out
    code, out, _ = call("store", name, str(tmp_path), *words, "--json")
    assert code == 0 and json.loads(out)["store"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("secret", [None, b"a secret"])
def test_what_is_damaged_is_told(secret: bytes | None, call: Any, tmp_path: Path) -> None:
    store = filled(tmp_path / "store", secret)
    key = tmp_path / "key"
    key.write_bytes((secret or b"none") + b"\n")
    words = [str(store.path), *(["--secret-file", str(key)] if secret else [])]
    code, out, error = call("store", "verify", *words)
    assert (code, error) == (0, "") and re.fullmatch(r"6 blobs, \d.* KiB: all are right\n", out)
    before = sorted(store)
    damage(store, page(ONE, 2), "k0-2")
    file(store, page(OTHER, 1), "k0-1").write_bytes(file(store, page(ONE, 1), "k0-1").read_bytes())
    code, out, error = call("store", "verify", *words)
    assert (code, error) == (1, "")
    assert f"{page(ONE, 2)} k0-2: damaged, or" in out
    assert f"{page(OTHER, 1)} k0-1: it is of {page(ONE, 1)} k0-1\n" in out
    assert re.search(r"\n6 blobs, .*, 2 damaged\n", out)
    code, out, _ = call("store", "verify", *words, "--json")
    told = json.loads(out)
    assert (code, told["blobs"], told["dropped"]) == (1, 6, 0)
    assert [one["page"] for one in told["damaged"]] == [page(ONE, 2), page(OTHER, 1)]
    assert len(left(store)) == 6
    code, out, _ = call("store", "verify", *words, "--drop")
    assert code == 0 and out.endswith("2 damaged, which were deleted\n")
    assert len(left(store)) == 4
    assert [entry for entry in before if entry in sorted(store)] == sorted(store)  # none was used
    code, out, _ = call("store", "verify", *words, "--drop", "--json")
    assert (code, json.loads(out)["damaged"], json.loads(out)["dropped"]) == (0, [], 0)


def test_a_pipe_in_place_of_a_blob_is_damaged(call: Any, store: FolderStore) -> None:
    path = file(store, page(ONE, 2), "k0-2")
    path.unlink()
    os.mkfifo(path)
    assert call("store", "ls", str(store.path))[0] == 0
    assert call("store", "stats", str(store.path))[0] == 0
    code, out, _ = call("store", "verify", str(store.path))
    assert code == 1 and "prw-r--r--, a regular file is needed" in out
    code, out, _ = call("store", "verify", str(store.path), "--drop")
    assert code == 0 and not path.exists()
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    assert call("store", "prune", str(store.path), "--max-bytes", "0")[0] == 0
    assert left(store) == set()


def test_a_forgotten_secret_deletes_nothing(call: Any, tmp_path: Path) -> None:
    store = filled(tmp_path, b"a secret")
    assert call("store", "verify", str(tmp_path))[0] == 1
    code, out, error = call("store", "verify", str(tmp_path), "--drop")
    assert (code, out) == (2, "") and "--secret-file" in error and error.count("\n") == 1
    assert len(left(store)) == 6


@pytest.mark.parametrize("text", [None, "", "\n"])
def test_a_secret_that_cannot_be_had(
    text: str | None, call: Any, store: FolderStore, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "key").write_text(text)
    words = ("--secret-file", str(tmp_path / "key"))
    code, out, error = call("store", "verify", str(store.path), *words)
    assert (code, out) == (2, "") and error.startswith("error: --secret-file ")


def test_what_is_old_goes(call: Any, store: FolderStore) -> None:
    code, out, error = call("store", "prune", str(store.path), "--older-than", "2.5")
    assert (code, error) == (0, "") and re.match(r"deleted: 3 blobs, .* KiB; .* KiB left\n", out)
    assert left(store) == {(page(ONE, number), part) for number, part in PARTS[:3]}
    code, out, _ = call("store", "prune", str(store.path), "--older-than", "2.5", "--json")
    told = json.loads(out)
    assert (code, told["blobs"], told["nbytes"]) == (0, 0, 0)
    assert told["nbytes_left"] == sum(entry.nbytes for entry in store)


def test_what_is_too_much_goes(call: Any, store: FolderStore) -> None:
    size = max(entry.nbytes for entry in store)
    code, out, _ = call("store", "prune", str(store.path), "--max-bytes", str(2 * size), "--json")
    assert code == 0 and json.loads(out)["blobs"] == 4
    assert left(store) == {(page(ONE, number), part) for number, part in PARTS[:2]}


def test_a_namespace_goes(call: Any, store: FolderStore) -> None:
    code, out, _ = call("store", "prune", str(store.path), "--namespace", ONE)
    assert code == 0 and f" of {ONE}; 0 B left\n" in out
    assert {name for name, _ in left(store)} == {page(OTHER, 1), page(OTHER, 2)}


def test_what_is_old_and_too_much_of_a_namespace_goes(call: Any, store: FolderStore) -> None:
    size = max(entry.nbytes for entry in store)
    words = ["--namespace", ONE, "--older-than", "2.5", "--max-bytes", str(2 * size)]
    code, out, _ = call("store", "prune", str(store.path), *words, "--json")
    assert (code, json.loads(out)["blobs"]) == (0, 2)
    kept = {(page(ONE, number), part) for number, part in PARTS[:2]}
    assert left(store) == {*kept, (page(OTHER, 1), "k0-1"), (page(OTHER, 2), "k0-2")}


def test_what_killed_writers_left_goes(call: Any, store: FolderStore) -> None:
    half = file(store, page(ONE, 1), f"{1:016x}.part")
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    _, out, _ = call("store", "prune", str(store.path), "--older-than", "100")
    assert "deleted: 1 that killed writers left unfinished\n" in out and not half.exists()


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
def test_what_is_to_go_has_to_be_said(
    words: tuple[str, ...], call: Any, store: FolderStore
) -> None:
    code, out, error = call("store", "prune", str(store.path), *words)
    assert (code, out) == (2, "") and error.startswith("error: ")
    assert len(left(store)) == 6


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "no such folder"),
        ("nowhere/deep", "no such folder"),
        ("file", "a folder is needed"),
        ("others", "no store of kvant"),
        ("redis://:geheim@host", "a folder is needed"),
    ],
)
def test_what_is_no_store_is_refused(
    command: str, name: str, why: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("others/photos/holiday").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    verb, *words = command.split()
    code, out, error = call("store", verb, name, *words)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: .*{why}.*\n", error) and "geheim" not in error
    assert sorted(tmp_path.rglob("*")) == before
