"""Test `kvant chat` in a pipe: a line is a message; lines with a slash are commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvant import demo

KVANT = str(Path(sys.executable).with_name("kvant"))
WORDS = ("chat", "--max-new-tokens", "5")
REFUSING = """{%- for message in messages -%}
{%- if message.content.startswith("class") -%}
{{ raise_exception("no classes\\nsaid in two lines") }}
{%- endif -%}
{{ message.content }}
{%- endfor -%}"""


def test_each_line_is_a_message_and_replies_go_to_stdout(call: Any) -> None:
    code, out, error = call(*WORDS, typed="import os\n\ndef f\n")
    assert (code, error) == (0, "")
    replies = json.loads(call(*WORDS, "--json", typed="import os\n\ndef f\n")[1])["turns"]
    assert [turn["message"] for turn in replies] == ["import os", "def f"]
    assert out == "".join(turn["reply"] + "\n" for turn in replies)


def test_turn_reuses_cached_turns(call: Any) -> None:
    report = json.loads(call(*WORDS, "--json", typed="import os\ndef f\nclass A\n")[1])
    assert report["cache"]["hit_rate"] > 0.5


def test_statistics_follow_each_reply(call: Any) -> None:
    words = (*WORDS, "--stats", "--no-guard", "--kv-cache", "affine8")
    _, _, error = call(*words, typed="import os\ndef f\n")
    assert [line.partition(" tokens")[0] for line in error.splitlines()] == ["5", "5"]
    assert error.count("affine8: ") == 2


def test_statistics_name_what_is_stored(call: Any) -> None:
    """Regression: they named the requested format after `adaptive` had changed it."""
    words = ("chat", "--max-new-tokens", "220", "--stats", "--strategy", "adaptive")
    _, _, error = call(*words, "--budget", "700KiB", typed="import os\ndef f\n")
    lines = [line for line in error.splitlines() if "first after" in line]
    assert [line.partition("; ")[2][:7] for line in lines] == ["affine8", "affine4"]
    assert error.count("tokens: raw to affine8, ") == 1, "a step is told after the turn it was in"


def test_undo_and_resend_gives_the_same_reply(call: Any) -> None:
    _, out, error = call(*WORDS, typed="import os\ndef f\n/rewind\ndef f\n")
    first, second, third = out.split("\n", 3)[:3] if out.count("\n") == 3 else (out, "", "?")
    assert second == third and first != second
    assert error == "rewound to turn 1, 7 tokens\n"


def test_fork_keeps_its_conversation(call: Any) -> None:
    lines = "import os\n/fork\nclass A\n/fork 1\n/stats\nclass A\n"
    report = json.loads(call(*WORDS, "--json", typed=lines)[1])
    assert [turn["message"] for turn in report["turns"]] == ["import os", "class A"]
    error = call(*WORDS, "--json", typed=lines)[2]
    assert (
        error.startswith("saved as branch 1")
        and "on branch 1: 1 turn, " in error
        and "in 1 turn, " in error
    )


def test_conversation_resumes_from_its_file(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.kv.safetensors"
    whole = call(*WORDS, typed="import os\ndef f\n")[1]
    first = call(*WORDS, typed=f"import os\n/save {file}\n")[1]
    other = call(*WORDS, typed="class A\n")[1]
    output = call(*WORDS, typed=f"class A\n/load {file}\ndef f\n")[1]
    assert output.startswith(other) and first + output.removeprefix(other) == whole
    assert first + call(*WORDS, "--load", str(file), typed="def f\n")[1] == whole


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/dance", "/dance is unknown"),
        ("/rewind 2", "there is 1 turn"),
        ("/rewind a", "a number is needed"),
        ("/fork 3", "saved so far: 0"),
        ("/save", "the name of a file"),
        ("/save nowhere/a", "in an existing folder"),
        ("/save ~nosuchuser/a", "there is no such home folder"),
        ("half \udce4", "the message is not UTF-8 text"),
        ("/load nowhere", "there is no such file"),
        ("word " * 3000, "for a context of 2048"),
    ],
    ids=lambda text: text[:12],
)
def test_user_error_is_one_line_and_the_chat_continues(line: str, message: str, call: Any) -> None:
    plain = call(*WORDS, typed="import os\ndef f\n")[1]
    code, out, error = call(*WORDS, typed=f"import os\n{line}\ndef f\n")
    assert (code, out, error.count("\n")) == (0, plain, 1)
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize("content", [b"import os\nhalf \xe4\nimport os\n", b"half \xe4"])
def test_a_bad_byte_is_an_error_of_its_line(content: bytes) -> None:
    """With a standard input that refuses bad bytes, and at its end."""
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    result = subprocess.run(
        [KVANT, *WORDS], input=content, capture_output=True, env=environment, check=True
    )
    assert result.stderr.decode().count("the message is not UTF-8 text") == 1
    assert result.stdout.count(b".path") >= content.count(b"import os")


def test_a_message_that_the_template_refuses_is_dropped(call: Any, tmp_path: Path) -> None:
    for file in demo.PATH.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(REFUSING)
    words = (*WORDS, "--model", str(tmp_path))
    plain = call(*words, typed="import os\ndef f\n")
    assert plain[0] == 0 and plain[2] == ""
    code, out, error = call(*words, typed="import os\nclass A\ndef f\n")
    assert (code, out) == plain[:2]
    assert error == "error: the chat template of the model refuses this: no classes\n"


def test_quit_and_reset(call: Any) -> None:
    once = call(*WORDS, typed="import os\n")[1]
    assert call(*WORDS, typed="import os\n/quit\ndef f\n")[1] == once
    assert call(*WORDS, typed="import os\n/reset\nimport os\n")[1] == once * 2
    assert "/rewind" in call(*WORDS, typed="/help\n")[2]


@pytest.mark.parametrize("command", [pytest.param("run -", marks=pytest.mark.laws), "chat"])
def test_missing_stdin_gives_no_traceback(command: str) -> None:
    words = [KVANT, *command.split()]
    process = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *words], capture_output=True)
    assert (process.returncode, process.stdout) == (2 if "run" in command else 0, b"")
    assert process.stderr.count(b"\n") <= 1


def test_system_message_together_with_a_file_is_refused(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.kv"
    call(*WORDS, typed=f"import os\n/save {file}\n")
    code, out, error = call("chat", "--load", str(file), "--system", "Be brief.")
    assert (code, out, error.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("words", [("--kv-cache", "affine9"), ("--top-p", "7")], ids=str)
def test_invalid_options_are_one_line_and_exit_code_2(words: tuple[str, ...], call: Any) -> None:
    code, out, error = call("chat", *words, typed="import os\n")
    assert (code, out, error.count("\n")) == (2, "", 1)
