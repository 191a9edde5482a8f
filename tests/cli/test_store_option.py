"""Test `--store`: prompts cached by one command are reused by the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvant.prefixes import Prefixes
from kvant.stores import FolderStore

TEXT = "def add(a, b):\n    return a + b\n\n" * 12


def run_json(call: Any, *words: str) -> tuple[dict[str, Any], str]:
    code, out, error = call("run", "--prompt", TEXT, "--max-new-tokens", "4", "--json", *words)
    assert code == 0, error
    return json.loads(out), error


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4"])
def test_prompt_is_prefilled_once(call: Any, tmp_path: Path, spec: str) -> None:
    words = ("--kv-cache", spec, "--no-guard", "--store", str(tmp_path / "kept"))
    first, second = run_json(call, *words)[0], run_json(call, *words)[0]
    assert first["cache"]["tokens_restored"] == 0
    prompt_tokens = second["cache"]["tokens_asked"]
    assert second["cache"]["tokens_restored"] >= prompt_tokens - 64
    assert second["text"] == first["text"]


def test_reused_tokens_are_reported(call: Any, tmp_path: Path) -> None:
    words = ("run", "--prompt", TEXT, "--max-new-tokens", "4", "--stats", "--store", str(tmp_path))
    assert "from the store" not in call(*words)[2]
    assert "from the store" in call(*words)[2]


def test_conversation_reuses_the_prefix_of_another(call: Any, tmp_path: Path) -> None:
    words = ("chat", "--max-new-tokens", "4", "--json", "--store", str(tmp_path))
    restored = []
    for message in ("and now?", "or then?"):
        code, out, error = call(*words, "--system", TEXT, typed=f"{message}\n")
        assert code == 0, error
        restored.append(json.loads(out)["cache"]["tokens_restored"])
    assert restored[0] == 0 and restored[1] >= 64


def test_batch_reuses_the_prefix_of_another(call: Any, tmp_path: Path) -> None:
    file, hits = tmp_path / "prompts", []
    for out, prompts in (("one", 1), ("three", 3)):  # three may find a prefix stored by one of them
        lines = (json.dumps({"prompt": TEXT + f"# {n}"}) + "\n" for n in range(prompts))
        file.write_text("".join(lines))
        words = ("--out", str(tmp_path / out), "--store", str(tmp_path / "kept"))
        limits = ("--max-new-tokens", "4", "--no-guard", "--json")
        code, printed, error = call("batch", str(file), *words, *limits)
        assert code == 0, error
        hits.append(json.loads(printed)["engine"]["restored_tokens"])
    assert hits[1] > hits[0] == 0
    assert (tmp_path / "one").read_bytes() in (tmp_path / "three").read_bytes()


@pytest.mark.parametrize("command", ["run", "chat", "batch"])
def test_invalid_store_is_reported_before_loading(call: Any, tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    more = {"batch": (str(file), "--out", str(tmp_path / "out"))}.get(command, ())
    code, _, error = call(command, *more, "--store", str(file), typed="x\n")
    assert code == 2 and f"{file} is a file, a folder is needed" in error


def test_failing_store_is_reported(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: FolderStore, page: str, part: str, blob: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderStore, "put", full)
    report, error = run_json(call, "--store", str(tmp_path))
    assert report["tokens"] == 4
    assert "warning: " in error and "pages were not written to" in error


def test_budget_together_with_a_store_is_refused(call: Any, tmp_path: Path) -> None:
    words = ("run", "--strategy", "adaptive", "--budget", "1MiB", "--store", str(tmp_path / "kept"))
    code, _, error = call(*words)
    assert code == 2 and "--budget with --store" in error
    assert not (tmp_path / "kept").exists()


def test_interrupt_does_not_wait_for_the_store(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def never(self: FolderStore, page: str, part: str, blob: bytes) -> None:
        log.append(page)

    def interrupt(self: Any, seconds: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(FolderStore, "put", never)
    monkeypatch.setattr(Prefixes, "flush", interrupt)
    # the writer pauses for years after the first blob
    monkeypatch.setattr("kvant.stores.tiers.WRITER_CPU_SHARE", 1e-9)
    code, out, _ = call(
        "run", "--prompt", TEXT, "--max-new-tokens", "4", "--json", "--store", str(tmp_path)
    )
    assert code == 130 and json.loads(out)["tokens"] == 4  # the reply was complete
    assert len(log) <= 1
