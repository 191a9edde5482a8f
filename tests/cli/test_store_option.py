"""`--store`: what one command read, the next one does not read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvant.prefixes import Prefixes
from kvant.stores import FolderStore

TEXT = "def add(a, b):\n    return a + b\n\n" * 12


def run(call: Any, *words: str) -> tuple[dict[str, Any], str]:
    code, out, error = call("run", "--prompt", TEXT, "--max-new-tokens", "4", "--json", *words)
    assert code == 0, error
    return json.loads(out), error


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4"])
def test_a_prompt_is_read_once(call: Any, tmp_path: Path, spec: str) -> None:
    words = ("--kv-cache", spec, "--no-guard", "--store", str(tmp_path / "kept"))
    first, again = run(call, *words)[0], run(call, *words)[0]
    assert first["cache"]["tokens_restored"] == 0
    asked = again["cache"]["tokens_asked"]
    assert again["cache"]["tokens_restored"] >= asked - 64
    assert again["text"] == first["text"]


def test_people_are_told(call: Any, tmp_path: Path) -> None:
    words = ("run", "--prompt", TEXT, "--max-new-tokens", "4", "--stats", "--store", str(tmp_path))
    assert "from the store" not in call(*words)[2]
    assert "from the store" in call(*words)[2]


def test_a_conversation_begins_where_another_one_did(call: Any, tmp_path: Path) -> None:
    words = ("chat", "--max-new-tokens", "4", "--json", "--store", str(tmp_path))
    restored = []
    for message in ("and now?", "or then?"):
        code, out, error = call(*words, "--system", TEXT, typed=f"{message}\n")
        assert code == 0, error
        restored.append(json.loads(out)["cache"]["tokens_restored"])
    assert restored[0] == 0 and restored[1] >= 64


def test_a_batch_begins_with_what_another_one_read(call: Any, tmp_path: Path) -> None:
    file, told = tmp_path / "prompts", []
    for out, prompts in (("one", 1), ("three", 3)):  # three may find what one of them kept
        lines = (json.dumps({"prompt": TEXT + f"# {n}"}) + "\n" for n in range(prompts))
        file.write_text("".join(lines))
        words = ("--out", str(tmp_path / out), "--store", str(tmp_path / "kept"))
        limits = ("--max-new-tokens", "4", "--no-guard", "--json")
        code, printed, error = call("batch", str(file), *words, *limits)
        assert code == 0, error
        told.append(json.loads(printed)["engine"]["restored_tokens"])
    assert told[1] > told[0] == 0
    assert (tmp_path / "one").read_bytes() in (tmp_path / "three").read_bytes()


@pytest.mark.parametrize("command", ["run", "chat", "batch"])
def test_what_is_no_store_is_told_before_anything_is_loaded(
    call: Any, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    more = {"batch": (str(file), "--out", str(tmp_path / "out"))}.get(command, ())
    code, _, error = call(command, *more, "--store", str(file), typed="x\n")
    assert code == 2 and f"{file}: a file, a folder is needed" in error


def test_a_store_that_fails_is_told(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: FolderStore, page: str, part: str, blob: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderStore, "put", full)
    told, error = run(call, "--store", str(tmp_path))
    assert told["tokens"] == 4
    assert "warning: " in error and "did not take" in error


def test_a_budget_beside_a_store_is_refused(call: Any, tmp_path: Path) -> None:
    words = ("run", "--strategy", "adaptive", "--budget", "1MiB", "--store", str(tmp_path / "kept"))
    code, _, error = call(*words)
    assert code == 2 and "--budget beside --store" in error
    assert not (tmp_path / "kept").exists()


def test_who_is_interrupted_waits_for_nothing(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def never(self: FolderStore, page: str, part: str, blob: bytes) -> None:
        written.append(page)

    def interrupted(self: Any, seconds: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(FolderStore, "put", never)
    monkeypatch.setattr(Prefixes, "flush", interrupted)
    monkeypatch.setattr(
        "kvant.stores.tiers.WRITER_CPU_SHARE", 1e-9
    )  # a pause of years behind the first
    code, out, _ = call(
        "run", "--prompt", TEXT, "--max-new-tokens", "4", "--json", "--store", str(tmp_path)
    )
    assert code == 130 and json.loads(out)["tokens"] == 4  # the reply was there
    assert len(written) <= 1
