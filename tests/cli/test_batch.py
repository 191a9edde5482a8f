"""`kvant batch`: lines in, lines out, in order, also after it was killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

KVANT = str(Path(sys.executable).with_name("kvant"))


def written(path: Path, count: int) -> Path:
    """Prompts of several lengths, some with options of their own."""
    lines = []
    for number in range(count):
        line: dict[str, Any] = {"prompt": f"def f{number}({'a, ' * (number % 7)}"}
        if number % 3 == 0:
            line |= {"max_new_tokens": 3 + number % 11, "temperature": 0.8}
        if number % 5 == 0:
            line["stop"] = [")"]
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path


def summary(prompts: int, failed: int, tokens: int | str = "[0-9]+") -> str:
    """The line that a run ends with, as a pattern."""
    return (
        rf"{prompts} prompts, {failed} failed: {tokens} tokens in [0-9.]+ s, [0-9.]+ a second; "
        r"[0-9]+ of [0-9]+ tokens of prompts were cached\n"
    )


def test_figures_of_a_run_for_programs(call: Any, tmp_path: Path) -> None:
    file, out = written(tmp_path / "in", 3), tmp_path / "out"
    code, said, error = call("batch", str(file), "--out", str(out), "--no-guard", "--json")
    told = json.loads(said)
    assert (code, error) == (0, "")
    assert told["tokens"] == told["engine"]["completion_tokens"] > 0 and told["seconds"] > 0
    assert told["tokens_a_second"] == told["tokens"] / told["seconds"]


def test_a_bar_begins_with_all_there_is_to_do(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "kvant.progress.ProgressBar.update", lambda self, *counts: shown.append(counts)
    )
    file, out = written(tmp_path / "in", 3), tmp_path / "out"
    assert call("batch", str(file), "--out", str(out), "--no-guard")[0] == 0
    assert shown == [(0, 3), (1, 3), (2, 3), (3, 3)]


def replies(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_has_its_reply(call: Any, tmp_path: Path) -> None:
    file, out = written(tmp_path / "in", 9), tmp_path / "out"
    words = ("batch", str(file), "--out", str(out), "--max-new-tokens", "6", "--no-guard")
    code, said, error = call(*words, "--max-sequences", "3")
    found = replies(out)
    tokens = sum(line["usage"]["completion_tokens"] for line in found)
    assert (code, said) == (0, "")
    assert re.fullmatch(summary(9, 0, tokens), error)
    assert [line["index"] for line in found] == list(range(9))
    assert [line["usage"]["completion_tokens"] for line in found][1:3] == [6, 6]
    assert found[0]["finish_reason"] in ("length", "stop") and ")" not in found[5]["text"]
    told = json.loads(call(*words, "--json")[1])
    assert (told["prompts"], told["done_before"], told["failed"]) == (9, 9, 0)
    assert (told["seconds"], told["tokens"], told["tokens_a_second"]) == (0, 0, None)
    assert set(told["engine"].values()) == {0} and told["engine"].keys() >= {"cached_tokens"}
    assert replies(out) == found


def test_a_full_disk_is_one_line_that_names_the_file(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvant.cli.batch._read_progress", lambda *given: (0, 0)
    )  # it reads without end
    file = written(tmp_path / "in", 1)
    code, _, error = call("batch", str(file), "--out", "/dev/full", "--no-guard")
    assert code == 1
    assert error.splitlines()[-1].endswith("No space left on device: '/dev/full'")


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.laws)])
def test_a_run_that_was_killed_goes_on_to_the_same_file(
    call: Any, tmp_path: Path, count: int
) -> None:
    file, out, whole = written(tmp_path / "in", count), tmp_path / "out", tmp_path / "whole"
    words = ["batch", str(file), "--seed", "5", "--max-new-tokens", "20", "--no-guard"]
    running = subprocess.Popen([KVANT, *words, "--out", str(out)])
    while not out.exists() or out.read_bytes().count(b"\n") < count // 4:
        assert running.poll() is None, "it was done before it could be killed"
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.wait()
    before = out.read_bytes().count(b"\n")
    with out.open("ab") as half:
        half.write(f'{{"index": {before}, '.encode())
    assert count // 4 <= before < count
    code, _, error = call(*words, "--out", str(out))
    there, figures = error.splitlines(keepends=True)
    assert (code, there) == (0, f"{before} of {count} were there already\n")
    assert re.fullmatch(summary(count - before, 0), figures)
    assert call(*words, "--out", str(whole))[0] == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2 is no JSON"),
        ('["a"]', 'line 2: an object with "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'line 2: an object with "prompt" or "messages"'),
        ('{"promt": "a"}', 'line 2: an object with "prompt" or "messages"'),
        ('{"prompt": "a", "temprature": 1}', "line 2: 'temprature' is not known"),
        ('{"prompt": 7}', "line 2: the prompt is no text"),
        ('{"messages": "a"}', "line 2: messages is no list"),
        ('{"prompt": "a", "top_k": "5"}', 'line 2: top_k is "5"'),
        ('{"prompt": "a", "seed": true}', "line 2: seed is true"),
        ('{"prompt": "a", "top_p": 7}', "line 2: top_p=7: 0 to 1"),
        ('{"prompt": "a", "max_new_tokens": 0}', "line 2: max_new_tokens=0: 1 or more"),
        ('{"prompt": "a", "stop": ""}', "line 2: stop"),
        ('{"prompt": "a", "stop": [1]}', "line 2: stop is [1]: texts are needed"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_done(
    call: Any, tmp_path: Path, line: str, told: str
) -> None:
    file, out = tmp_path / "in", tmp_path / "out"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    code, said, error = call("batch", str(file), "--out", str(out))
    assert (code, said) == (2, "") and error.startswith("error: ") and error.count("\n") == 1
    assert told in error and not out.exists()


def test_a_file_of_another_run_is_refused_and_kept(call: Any, tmp_path: Path) -> None:
    file, out = written(tmp_path / "in", 2), tmp_path / "out"
    words = ("batch", str(file), "--out", str(out), "--max-new-tokens", "2", "--no-guard")
    assert call(*words)[0] == 0
    before = out.read_bytes()
    code, _, error = call(*words, "--temperature", "0.5")
    assert code == 2 and "line 2 is the reply to another prompt, or with other options" in error
    assert out.read_bytes() == before
    for mine in (b"notes of mine\n", b"notes of mine", before + b"and notes"):
        out.write_bytes(mine)
        code, _, error = call(*words)
        assert code == 2 and "is no reply of kvant batch" in error
        assert out.read_bytes() == mine


def test_lines_end_at_newlines_alone_and_null_is_nothing(call: Any, tmp_path: Path) -> None:
    file, out = tmp_path / "in", tmp_path / "out"
    lines = ['{"prompt": "a\u2028b\x85c"}', "", '{"prompt": "a", "max_new_tokens": null}\r']
    file.write_bytes("\n".join(lines).encode())
    words = ("batch", str(file), "--out", str(out), "--max-new-tokens", "2", "--no-guard")
    assert call(*words)[:2] == (0, "")
    assert [line["usage"]["completion_tokens"] for line in replies(out)] == [2, 2]
    file.write_text("\n\n{\n")
    assert "line 3 is no JSON" in call(*words)[2]


def test_a_request_that_fails_leaves_the_others(call: Any, tmp_path: Path) -> None:
    file, out = tmp_path / "in", tmp_path / "out"
    file.write_text('{"prompt": "a"}\n{"prompt": ""}\n{"prompt": "b"}\n')
    words = ("batch", str(file), "--out", str(out), "--max-new-tokens", "2", "--no-guard")
    code, _, error = call(*words)
    figures, failed = error.splitlines(keepends=True)
    assert (code, failed) == (1, f"1 of 3 prompts failed: see `error` in {out}\n")
    assert re.fullmatch(summary(3, 1), figures)
    told = f"3 of 3 were there already\n1 of 3 prompts failed: see `error` in {out}\n"
    assert call(*words) == (1, "", told)
    found = replies(out)
    assert "no tokens" in found[1]["error"] and "text" in found[0] and "text" in found[2]


@pytest.mark.parametrize(
    "words",
    [
        ("--kv-cache", "affine9"),
        ("--max-bytes", "much"),
        ("--max-sequences", "0"),
        ("--backend", "cuda"),
        ("--device", "tpu"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line(call: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    file = written(tmp_path / "in", 1)
    code, out, error = call("batch", str(file), "--out", str(tmp_path / "out"), *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
