"""`kvant chat` in a pipe: a line is a message, what begins with a slash is about the talk."""

from __future__ import annotations

import json
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


def test_a_line_is_a_message_and_replies_go_to_standard_output(call: Any) -> None:
    code, out, error = call(*WORDS, typed="import os\n\ndef f\n")
    assert (code, error) == (0, "")
    replies = json.loads(call(*WORDS, "--json", typed="import os\n\ndef f\n")[1])["turns"]
    assert [turn["message"] for turn in replies] == ["import os", "def f"]
    assert out == "".join(turn["reply"] + "\n" for turn in replies)


def test_a_turn_re_uses_the_ones_before(call: Any) -> None:
    told = json.loads(call(*WORDS, "--json", typed="import os\ndef f\nclass A\n")[1])
    assert told["cache"]["hit_rate"] > 0.5


def test_statistics_follow_each_reply(call: Any) -> None:
    asked = (*WORDS, "--stats", "--no-guard", "--kv-cache", "affine8")
    _, _, error = call(*asked, typed="import os\ndef f\n")
    assert [line.partition(" tokens")[0] for line in error.splitlines()] == ["5", "5"]
    assert error.count("affine8: ") == 2


def test_statistics_name_what_is_stored_now(call: Any) -> None:
    """They named the format that was asked for, whatever `adaptive` had made of it."""
    words = ("chat", "--max-new-tokens", "220", "--stats", "--strategy", "adaptive")
    _, _, error = call(*words, "--budget", "700KiB", typed="import os\ndef f\n")
    told = [line for line in error.splitlines() if "first after" in line]
    assert [line.partition("; ")[2][:7] for line in told] == ["affine8", "affine4"]
    assert error.count("tokens: raw to affine8, ") == 1, "a step is told after the turn it was in"


def test_back_and_again_is_the_same_reply(call: Any) -> None:
    _, out, error = call(*WORDS, typed="import os\ndef f\n/rewind\ndef f\n")
    first, second, third = out.split("\n", 3)[:3] if out.count("\n") == 3 else (out, "", "?")
    assert second == third and first != second
    assert error == "back after turn 1, at 7 tokens\n"


def test_a_fork_is_kept_as_it_was(call: Any) -> None:
    lines = "import os\n/fork\nclass A\n/fork 1\n/stats\nclass A\n"
    told = json.loads(call(*WORDS, "--json", typed=lines)[1])
    assert [turn["message"] for turn in told["turns"]] == ["import os", "class A"]
    error = call(*WORDS, "--json", typed=lines)[2]
    assert error.startswith("kept as 1") and "at 1: 1 turn, " in error and "in 1 turn, " in error


def test_a_talk_goes_on_where_it_was_saved(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.kv.safetensors"
    whole = call(*WORDS, typed="import os\ndef f\n")[1]
    first = call(*WORDS, typed=f"import os\n/save {file}\n")[1]
    other = call(*WORDS, typed="class A\n")[1]
    both = call(*WORDS, typed=f"class A\n/load {file}\ndef f\n")[1]
    assert both.startswith(other) and first + both.removeprefix(other) == whole
    assert first + call(*WORDS, "--load", str(file), typed="def f\n")[1] == whole


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/dance", "/dance is unknown"),
        ("/rewind 2", "there is 1 turn"),
        ("/rewind a", "a number is needed"),
        ("/fork 3", "0 are kept"),
        ("/save", "the name of a file"),
        ("/save nowhere/a", "in a folder that exists"),
        ("/load nowhere", "there is no such file"),
        ("word " * 3000, "for a context of 2048"),
    ],
    ids=lambda text: text[:12],
)
def test_a_mistake_is_one_line_and_the_talk_goes_on(line: str, told: str, call: Any) -> None:
    plain = call(*WORDS, typed="import os\ndef f\n")[1]
    code, out, error = call(*WORDS, typed=f"import os\n{line}\ndef f\n")
    assert (code, out, error.count("\n")) == (0, plain, 1)
    assert error.startswith("error: ") and told in error


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
def test_no_standard_input_is_no_traceback(command: str) -> None:
    words = [KVANT, *command.split()]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *words], capture_output=True)
    assert (done.returncode, done.stdout) == (2 if "run" in command else 0, b"")
    assert done.stderr.count(b"\n") <= 1


def test_a_system_message_beside_a_file_is_refused(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.kv"
    call(*WORDS, typed=f"import os\n/save {file}\n")
    code, out, error = call("chat", "--load", str(file), "--system", "Be brief.")
    assert (code, out, error.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("words", [("--kv-cache", "affine9"), ("--top-p", "7")], ids=str)
def test_wrong_options_are_one_line_and_exit_code_2(words: tuple[str, ...], call: Any) -> None:
    code, out, error = call("chat", *words, typed="import os\n")
    assert (code, out, error.count("\n")) == (2, "", 1)
