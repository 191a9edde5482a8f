"""Test `kvant batch`: input lines, output lines in order, and resuming after a kill."""

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

from kvant import demo

KVANT = str(Path(sys.executable).with_name("kvant"))


def write_prompts(path: Path, count: int) -> Path:
    """Write prompts of several lengths, some with options."""
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


def summary_pattern(prompts: int, failed: int, tokens: int | str = "[0-9]+") -> str:
    """Return the pattern of a run's last line."""
    return (
        rf"{prompts} prompts, {failed} failed: {tokens} tokens in [0-9.]+ s, [0-9.]+ a second; "
        r"[0-9]+ of [0-9]+ prompt tokens were cached\n"
    )


def test_json_reports_the_figures_of_a_run(call: Any, tmp_path: Path) -> None:
    file, out = write_prompts(tmp_path / "in", 3), tmp_path / "out"
    code, output, error = call("batch", str(file), "--out", str(out), "--no-guard", "--json")
    report = json.loads(output)
    assert (code, error) == (0, "")
    assert report["tokens"] == report["engine"]["completion_tokens"] > 0 and report["seconds"] > 0
    assert report["tokens_a_second"] == report["tokens"] / report["seconds"]


def test_drafts_of_a_model_change_no_reply(call: Any, tmp_path: Path) -> None:
    file, replies = write_prompts(tmp_path / "in", 3), list[list[Any]]()
    for draft in ((), ("--draft", str(demo.PATH))):
        out = tmp_path / f"out{len(draft)}"
        words = ("batch", str(file), "--out", str(out), "--dtype", "float32", "--no-guard", *draft)
        assert call(*words, "--max-new-tokens", "9", "--seed", "3", "--json")[0] == 0
        replies.append([line["text"] for line in read_replies(out)])
    assert replies[0] == replies[1]


def test_progress_bar_starts_with_the_total(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "kvant.platform.terminal.ProgressBar.update", lambda self, *counts: updates.append(counts)
    )
    file, out = write_prompts(tmp_path / "in", 3), tmp_path / "out"
    assert call("batch", str(file), "--out", str(out), "--no-guard")[0] == 0
    assert updates == [(0, 3), (1, 3), (2, 3), (3, 3)]


def read_replies(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_gets_a_reply(call: Any, tmp_path: Path) -> None:
    file, out = write_prompts(tmp_path / "in", 9), tmp_path / "out"
    words = ("batch", str(file), "--out", str(out), "--max-new-tokens", "6", "--no-guard")
    code, output, error = call(*words, "--max-sequences", "3")
    output_lines = read_replies(out)
    tokens = sum(line["usage"]["completion_tokens"] for line in output_lines)
    assert (code, output) == (0, "")
    assert re.fullmatch(summary_pattern(9, 0, tokens), error)
    assert [line["index"] for line in output_lines] == list(range(9))
    assert [line["usage"]["completion_tokens"] for line in output_lines][1:3] == [6, 6]
    assert (
        output_lines[0]["finish_reason"] in ("length", "stop")
        and ")" not in output_lines[5]["text"]
    )
    report = json.loads(call(*words, "--json")[1])
    assert (report["prompts"], report["done_before"], report["failed"]) == (9, 9, 0)
    assert (report["seconds"], report["tokens"], report["tokens_a_second"]) == (0, 0, None)
    assert set(report["engine"].values()) == {0} and report["engine"].keys() >= {"cached_tokens"}
    assert read_replies(out) == output_lines


def test_full_disk_is_one_error_line_with_the_file(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvant.cli.batch._read_progress", lambda *args: (0, 0))  # endless input
    file = write_prompts(tmp_path / "in", 1)
    code, _, error = call("batch", str(file), "--out", "/dev/full", "--no-guard")
    assert code == 1
    assert error.splitlines()[-1].endswith("No space left on device: '/dev/full'")


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.laws)])
def test_killed_run_resumes_into_the_same_file(call: Any, tmp_path: Path, count: int) -> None:
    file, out, whole = write_prompts(tmp_path / "in", count), tmp_path / "out", tmp_path / "whole"
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
    reused_line, figures = error.splitlines(keepends=True)
    assert (code, reused_line) == (0, f"{before} of {count} were done before\n")
    assert re.fullmatch(summary_pattern(count - before, 0), figures)
    assert call(*words, "--out", str(whole))[0] == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('["a"]', 'line 2: an object with either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'line 2: an object with either "prompt" or "messages"'),
        ('{"promt": "a"}', 'line 2: an object with either "prompt" or "messages"'),
        ('{"prompt": "a", "temprature": 1}', "line 2: unknown key 'temprature'"),
        ('{"prompt": 7}', "line 2: the prompt is not a string"),
        ('{"messages": "a"}', "line 2: messages is not a list"),
        ('{"prompt": "a", "top_k": "5"}', 'line 2: top_k is "5"'),
        ('{"prompt": "a", "seed": true}', "line 2: seed is true"),
        ('{"prompt": "a", "top_p": 7}', "line 2: top_p=7: 0 to 1"),
        ('{"prompt": "a", "max_new_tokens": 0}', "line 2: max_new_tokens=0: 1 or more"),
        ('{"prompt": "a", "stop": ""}', "line 2: stop"),
        ('{"prompt": "a", "stop": [1]}', "line 2: stop is [1]: strings are needed"),
    ],
)
def test_invalid_line_is_reported_before_any_work(
    call: Any, tmp_path: Path, line: str, message: str
) -> None:
    file, out = tmp_path / "in", tmp_path / "out"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    code, output, error = call("batch", str(file), "--out", str(out))
    assert (code, output) == (2, "") and error.startswith("error: ") and error.count("\n") == 1
    assert message in error and not out.exists()


def test_output_file_of_another_run_is_refused_and_unchanged(call: Any, tmp_path: Path) -> None:
    file, out = write_prompts(tmp_path / "in", 2), tmp_path / "out"
    words = ("batch", str(file), "--out", str(out), "--max-new-tokens", "2", "--no-guard")
    assert call(*words)[0] == 0
    before = out.read_bytes()
    code, _, error = call(*words, "--temperature", "0.5")
    assert code == 2 and "line 2 is the reply to another prompt, or with other options" in error
    assert out.read_bytes() == before
    assert call(*words, "--weights", "affine8")[0] == 2 and out.read_bytes() == before
    for mine in (b"notes of mine\n", b"notes of mine", before + b"and notes"):
        out.write_bytes(mine)
        code, _, error = call(*words)
        assert code == 2 and "is not a reply of kvant batch" in error
        assert out.read_bytes() == mine


def test_only_newlines_end_lines_and_null_means_unset(call: Any, tmp_path: Path) -> None:
    file, out = tmp_path / "in", tmp_path / "out"
    lines = ['{"prompt": "a\u2028b\x85c"}', "", '{"prompt": "a", "max_new_tokens": null}\r']
    file.write_bytes("\n".join(lines).encode())
    words = ("batch", str(file), "--out", str(out), "--max-new-tokens", "2", "--no-guard")
    assert call(*words)[:2] == (0, "")
    assert [line["usage"]["completion_tokens"] for line in read_replies(out)] == [2, 2]
    file.write_text("\n\n{\n")
    assert "line 3 is not JSON" in call(*words)[2]


def test_failed_request_does_not_stop_others(call: Any, tmp_path: Path) -> None:
    file, out = tmp_path / "in", tmp_path / "out"
    file.write_text('{"prompt": "a"}\n{"prompt": ""}\n{"prompt": "b"}\n')
    words = ("batch", str(file), "--out", str(out), "--max-new-tokens", "2", "--no-guard")
    code, _, error = call(*words)
    figures, failed = error.splitlines(keepends=True)
    assert (code, failed) == (1, f"1 of 3 prompts failed: see `error` in {out}\n")
    assert re.fullmatch(summary_pattern(3, 1), figures)
    expected_error = f"3 of 3 were done before\n1 of 3 prompts failed: see `error` in {out}\n"
    assert call(*words) == (1, "", expected_error)
    output_lines = read_replies(out)
    assert (
        "no tokens" in output_lines[1]["error"]
        and "text" in output_lines[0]
        and "text" in output_lines[2]
    )


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
def test_invalid_options_are_one_error_line(
    call: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    file = write_prompts(tmp_path / "in", 1)
    code, out, error = call("batch", str(file), "--out", str(tmp_path / "out"), *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
