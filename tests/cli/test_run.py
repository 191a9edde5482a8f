"""Test `kvant run` as installed: output, streams and exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvant
from generation.speakers import Numbers
from hf.zoo import build
from kvant import checkpoints, demo
from kvant.cli.run import DEFAULT_PROMPT
from kvant.generation import TransformersDecoder

KVANT = str(Path(sys.executable).with_name("kvant"))
SHORT = ("run", "--prompt", "import os\n", "--max-new-tokens", "6")


def test_run_continues_a_prompt(call: Any) -> None:
    code, out, error = call(*SHORT, "--kv-cache", "affine4")
    assert code == 0 and error.startswith("testing affine4 on the model (at most ")
    assert error.endswith("--no-guard skips it)\n") and error.count("\n") == 1
    assert call(*SHORT, "--kv-cache", "affine4") == (0, out, "")  # its verdict is cached
    assert out.startswith("import os\n") and len(out) > len("import os\n") + 1


def test_json_is_one_object(call: Any) -> None:
    words = ("run", "--prompt", "def f", "--max-new-tokens", "4", "--json", "--seed", "1")
    code, out, _ = call(*words)
    report = json.loads(out)
    assert (code, report["prompt"], report["tokens"]) == (0, "def f", 4)
    assert report["finish_reason"] == "length"
    assert report["cache"]["materialized"] == 0


def test_statistics_go_to_stderr(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompt.py"
    file.write_text("class A:\n")
    code, out, error = call("run", "--file", str(file), "--max-new-tokens", "3", "--stats")
    assert (code, out[:9]) == (0, "class A:\n")
    prompt, figures = error.splitlines()
    assert prompt == "prompt: a text to continue, without a template"
    assert figures.startswith("3 tokens") and "raw: " in figures


@pytest.mark.parametrize("words", [("-",), ("--prompt", "-")])
def test_a_prompt_can_be_piped(words: tuple[str, ...], call: Any) -> None:
    code, out, error = call("run", *words, "--max-new-tokens", "3", typed="class A:\n")
    assert (code, out[:9], error) == (0, "class A:\n", "")


def test_piped_text_is_the_prompt(call: Any) -> None:
    """Regression: `echo 'class A:'

    kvant run` continued a built-in prompt.
    """
    code, out, error = call("run", "--max-new-tokens", "3", typed="class A:\n")
    assert (code, out[:9], error) == (0, "class A:\n", "")
    plain = call("run", "--max-new-tokens", "3", typed="")
    assert plain[0] == 0 and plain[1].startswith(DEFAULT_PROMPT)
    assert call(*SHORT, typed="class A:\n") == call(*SHORT)


def test_piped_text_is_appended_to_a_file(call: Any, tmp_path: Path) -> None:
    file, short = str(tmp_path / "a.kv"), ("--max-new-tokens", "3")
    call(*SHORT, "--save", file)
    result = call("run", "--load", file, *short, "--prompt", "class A")
    assert call("run", "--load", file, *short, typed="class A") == result
    assert result[1].startswith("class A") and result[0] == 0


@pytest.mark.parametrize(
    "stdin",
    [
        *("</dev/null", "<noise"),
        *(pytest.param(stdin, marks=pytest.mark.laws) for stdin in ("<&-", "0>/dev/null")),
    ],
)
def test_missing_stdin_is_a_missing_prompt(stdin: str, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"\xff\xfe")
    line = f'exec "$@" {stdin}'
    words = ["sh", "-c", line, "sh", KVANT, "run", "--max-new-tokens", "1"]
    words += ["--dtype", "float32"]  # avoids the warning about a slow dtype
    process = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    if stdin == "<noise":
        assert (process.returncode, process.stdout) == (2, "")
        assert process.stderr == "error: the prompt is not UTF-8 text\n"
    else:
        assert (process.returncode, process.stderr) == (0, "") and process.stdout.startswith(
            DEFAULT_PROMPT
        )


@pytest.mark.parametrize(
    "words",
    [
        ("--strategy", "disabled"),
        ("--strategy", "long", "--threshold", "5"),
        ("--strategy", "adaptive", "--budget", "64MiB"),
        ("--draft", "ngram"),
        ("--draft", str(demo.PATH)),
    ],
    ids=str,
)
def test_strategies_and_drafts_give_the_same_text(words: tuple[str, ...], call: Any) -> None:
    plain = call(*SHORT)
    assert plain[0] == 0
    assert call(*SHORT, *words) == plain


@pytest.mark.usefixtures("quick_trials")
def test_auto_in_given_bits_reports_formats_by_layer(call: Any) -> None:
    code, out, error = call(*SHORT, "--kv-cache", "auto:3.25bits", "--json")
    lines = [line for line in error.splitlines() if not line.startswith("testing auto:")]
    first, chosen, _, *rows = lines
    assert code == 0 and first.startswith("auto:3.25bits: testing formats")
    assert re.fullmatch(r"auto:3.25bits: turbo\d\S*,layers=\S+", chosen)
    assert [row.split()[1] for row in rows if row.startswith("*")] == [chosen.split()[1]]
    assert chosen.split()[1].startswith(json.loads(out)["kv_cache"])
    code, _, error = call(*SHORT, "--kv-cache", "auto:1.5bits")
    assert (
        code == 2 and "a limit of 1.5 bits: the smallest format for this model, turbo2, " in error
    )


@pytest.mark.usefixtures("quick_trials")
def test_auto_reports_its_choice(call: Any) -> None:
    code, out, error = call(*SHORT, "--kv-cache", "auto", "--json")
    report = json.loads(out)
    lines = [line for line in error.splitlines() if not line.startswith("testing auto: ")]
    first, chosen, head, *rows = lines  # without the progress of a slow machine
    assert code == 0 and first.startswith("auto: testing formats") and chosen.startswith("auto: ")
    assert head.split() == [
        "format",
        "of",
        "raw",
        "mean",
        "KL",
        "top-1",
        "recall",
        "lost",
        "verdict",
    ]
    assert [row.split()[1] for row in rows if row.startswith("*")] == [chosen.split()[1]]
    assert rows[0].split()[0] == "turbo2" and rows[0].endswith("changes predictions")
    assert report["kv_cache"].startswith("turbo") and "warning" not in error


def test_context_can_be_set(call: Any) -> None:
    code, out, _ = call("run", "--prompt", "def f", "--max-context", "12", "--json")
    report = json.loads(out)
    assert (code, report["cache"]["length"], report["finish_reason"]) == (0, 11, "length")


def test_window_can_be_set_by_two_flags(call: Any) -> None:
    flags = ("--kv-window-size", "8", "--kv-window-keep", "2", "--max-new-tokens", "20")
    report = json.loads(call(*SHORT, *flags, "--kv-cache", "affine8", "--json")[1])
    assert report["kv_cache"] == "affine8,window=8,sinks=2"
    assert report["cache"]["length"] > report["cache"]["held"] == 8 + 2


def test_text_resumes_from_its_file(call: Any, tmp_path: Path) -> None:
    file, words = str(tmp_path / "a.kv.safetensors"), ("--kv-cache", "affine4")
    first = call(*SHORT, *words, "--save", file)[1].removesuffix("\n")
    code, rest, _ = call("run", "--load", file, "--max-new-tokens", "6")
    assert code == 0
    whole = call("run", "--prompt", "import os\n", "--max-new-tokens", "12", *words)[1]
    assert first + rest == whole


@pytest.mark.parametrize("heads", ["", ":adaptive"])
def test_pruned_prompt_is_saved(call: Any, tmp_path: Path, heads: str) -> None:
    file, text = str(tmp_path / "a.kv.safetensors"), "import os\nfrom sys import argv\n" * 12
    words = ("run", "--prompt", text, "--kv-cache", f"affine4,prune=snapkv:20%{heads}")
    first = call(*words, "--max-new-tokens", "6", "--save", file)[1].removesuffix("\n")
    code, rest, _ = call("run", "--load", file, "--max-new-tokens", "6")
    assert (code, first + rest) == (0, call(*words, "--max-new-tokens", "12")[1])
    output = call("inspect", file, "--json")[1]
    assert json.loads(output)["sequences"] == 1 and "2 heads of 64" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-cache", "affine9"), "nearest: affine8"),
        (("--kv-cache", "raw,window=-3"), "window"),
        (("--kv-window-size", "-3"), "window=-3"),
        (("--kv-window-size", "9", "--kv-cache", "raw,window=8"), "has window= too"),
        (("--kv-window-keep", "9", "--kv-cache", "raw,window=8,sinks=1"), "has sinks= too"),
        (("--kv-window-keep", "3"), "give --kv-window-size too"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "\udcff"), "the prompt is not UTF-8 text"),
        (("--draft", "./nowhere"), "--draft ./nowhere: no such folder"),
        (("-",), "the prompt is empty"),
        (("hello",), "a prompt needs --prompt before it"),
        (("--file", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("--file", "noise.bin"), "it is not UTF-8 text"),
        (("--file", "a", "--prompt", "b"), "give one of them"),
        (("--model", "./nowhere"), "no such folder"),
        (("--model", "."), "this folder has no config.json"),
        (("--model", "broken"), "broken/model.safetensors is corrupt or incomplete"),
        (("--prompt", "word " * 3000), "for a context of 2048"),
        (("--top-p", "7"), "top_p=7"),
        (("--strategy", "often"), "allowed are always, disabled, long, adaptive"),
        (("--strategy", "adaptive"), "needs budget="),
        (("--strategy", "adaptive", "--budget", "5 apples"), "5 apples"),
        (("--load", "nowhere.kv"), "there is no such file"),
        (("--load", "noise.bin"), "noise.bin: not a kvant cache"),
        (("--load", "other.kv"), "the file has 4 layers of 2 heads of 16, --model has 6 layers of"),
        (("--load", "plain.kv"), "without a conversation"),
        (("--load", "altered.kv"), "checksum"),
        (("--load", "other.kv", "--kv-cache", "raw"), "the file has its own format"),
        (("--save", "nowhere/a.kv"), "in an existing folder"),
        (("--max-new-tokens", "0"), "--max-new-tokens"),
        (("--temperature", "warm"), "--temperature"),
        (("--kv-cache", "auto:many"), "size 'many'"),
        (("--prefill-chunk", "0"), "--prefill-chunk"),
        (("--device", "tpu"), "known are cpu, cuda, cuda:N, mps"),
        (("--dtype", "int8"), "known are auto, float32, bfloat16, float16"),
        (("--kv_cache", "raw"), "--kv-cache"),
    ],
    ids=lambda words: " ".join(words)[:30] if isinstance(words, tuple) else None,
)
def test_user_error_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_wrong_files(tmp_path)
    code, out, error = call("run", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize(
    "words",
    [
        ("--kv-cache", "affine9"),
        ("--kv-cache", "auto:"),
        ("--top-p", "7"),
        ("--min-p", "-1"),
        ("--strategy", "often"),
        ("--strategy", "adaptive", "--budget", "5 apples"),
        ("--device", "tpu"),
        ("--dtype", "int8"),
        ("--draft", "broken"),
        ("--model", "broken"),
        ("--load", "noise.bin"),
        ("--load", "plain.kv"),
        ("--load", "other.kv"),
        ("--load", "altered.kv"),
    ],
    ids=" ".join,
)
def test_user_error_is_reported_before_a_model_is_loaded(
    command: str, words: tuple[str, ...], call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(checkpoints, "load", load)
    monkeypatch.chdir(tmp_path)
    _write_wrong_files(tmp_path)
    code, out, error = call(command, *words)
    assert (code, out, error.count("\n")) == (2, "", 1)


def test_file_of_a_same_shaped_model_is_refused_by_its_weights(call: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "a.kv")
    call(*SHORT, "--save", file)
    code, out, error = call("run", "--load", file, "--dtype", "float32")
    assert (code, out) == (2, "") and "with this one in another dtype" in error


def test_dtype_and_device_can_be_set(call: Any) -> None:
    report = json.loads(call(*SHORT, "--json")[1])
    float32_result = json.loads(call(*SHORT, "--json", "--dtype", "float32", "--device", "cpu")[1])
    assert float32_result["cache"]["nbytes"] == 2 * report["cache"]["nbytes"]


def test_prompt_is_prefilled_in_chunks(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    logits = TransformersDecoder.compute_logits

    def count_calls(self: Any, ids: list[int], *args: Any, **kwargs: Any) -> Any:
        read.append(len(ids))
        return logits(self, ids, *args, **kwargs)

    monkeypatch.setattr(TransformersDecoder, "compute_logits", count_calls)
    whole = call("run", "--prompt", "a b c d e f g", "--max-new-tokens", "2")
    assert (
        call("run", "--prompt", "a b c d e f g", "--max-new-tokens", "2", "--prefill-chunk", "3")
        == whole
    )
    assert read[1:] == [3] * (read[0] // 3) + ([read[0] % 3] if read[0] % 3 else [])


def test_an_unknown_command_is_one_line(call: Any) -> None:
    assert call("rnu") == (2, "", "error: No such command 'rnu'. Did you mean 'run'?\n")


def _write_wrong_files(folder: Path) -> None:
    (folder / "noise.bin").write_bytes(bytes(range(255, 0, -1)) * 9)
    session = kvant.Session(build("llama"), Numbers())
    list(session.send([5, 6, 7], max_new_tokens=1))
    session.save(folder / "other.kv")
    kvant.save(session.cache, folder / "plain.kv")
    raw = bytearray((folder / "other.kv").read_bytes())
    raw[-1] ^= 1
    (folder / "altered.kv").write_bytes(raw)
    broken = folder / "broken"
    broken.mkdir()
    for file in demo.PATH.iterdir():
        if file.suffix == ".json":
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"no weights at all")


def test_full_disk_leaves_the_older_file(call: Any, tmp_path: Path) -> None:
    """A file size limit of 20 KB simulates a full disk."""
    file = tmp_path / "a.kv.safetensors"
    words = [KVANT, *SHORT, "--dtype", "float32", "--save", str(file)]
    assert call(*words[1:])[0] == 0
    before = file.read_bytes()

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    process = subprocess.run(words, capture_output=True, text=True, preexec_fn=full, check=False)
    assert (process.returncode, process.stderr.count("\n")) == (1, 1)
    assert process.stderr.startswith("error: ")
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == [file.name]


def test_memory_budget_reports_each_downgrade(call: Any) -> None:
    words = ("run", "--prompt", "def f", "--max-new-tokens", "220", "--strategy", "adaptive")
    words += ("--budget", "700KiB", "--seed", "1")
    report = json.loads(call(*words, "--json")[1])
    cache = report["cache"]
    (step,) = cache["recoded"]
    assert (step["from"], step["to"], cache["recodes"]) == ("raw", "affine8", 1)
    assert cache["nbytes"] <= 700 * 1024 and step["nbytes_after"] < step["nbytes_before"]
    _, _, error = call(*words, "--stats")
    assert f"at {step['length']} tokens: raw to affine8, 576 KiB to " in error
    assert error.splitlines()[-1].partition("; ")[2].startswith("affine8: ")
    assert report["kv_cache"] == "affine8"


@pytest.mark.parametrize("command", ["run", "chat"])
def test_model_is_packed_by_default(
    command: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[kvant.Packing] = []
    pack = kvant.pack
    monkeypatch.setattr(
        "kvant.weights.packing.pack", lambda model, weights: packed.append(pack(model, weights))
    )
    words = {"run": (*SHORT, "--device", "cpu"), "chat": ("chat", "--max-new-tokens", "6")}[command]
    first = call(*words, typed="import os\n")
    assert first[0] == 0 and len(packed) == 1
    assert call(*words, "--no-pack", typed="import os\n") == first
    assert len(packed) == 1
    assert call(*words, "--draft", demo.PATH, typed="import os\n")[0] == 0
    assert len(packed) == 3


def test_prefilled_prompt_is_continued_later(call: Any, tmp_path: Path) -> None:
    file, short = str(tmp_path / "read.kv"), ("--max-new-tokens", "6")
    read = call("run", "--prompt", "import os\nimport sys\n", "--cache-prompt", file)
    assert read == (0, "", "")
    report = json.loads(call("run", "--load", file, "--prompt", "def f", *short, "--json")[1])
    whole = json.loads(call("run", "--prompt", "import os\nimport sys\ndef f", *short, "--json")[1])
    assert report["text"] == whole["text"]
    assert report["cache"]["tokens_reused"] > 0


def test_prefilled_prompt_of_one_token_is_continued_too(call: Any, tmp_path: Path) -> None:
    """Its row is computed with the next token, so the file has none."""
    file, short = str(tmp_path / "read.kv"), ("--max-new-tokens", "6", "--json")
    assert call("run", "--prompt", "P", "--cache-prompt", file) == (0, "", "")
    report = json.loads(call("run", "--load", file, "--prompt", "Q", *short)[1])
    assert report["text"] == json.loads(call("run", "--prompt", "PQ", *short)[1])["text"]


def test_single_chat_message_is_not_prefilled_alone(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = checkpoints.load(None)
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    session = kvant.Session(model, tokenizer)
    list(session.send("import os\n", max_new_tokens=2))
    session.save(tmp_path / "chat.kv")
    monkeypatch.setattr(checkpoints, "load", None)  # user errors are found before loading
    words = ("--load", str(tmp_path / "chat.kv"), "--cache-prompt", str(tmp_path / "read.kv"))
    code, out, error = call("run", *words, "--prompt", "def ")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "--cache-prompt with --load" in error and not (tmp_path / "read.kv").exists()


def test_only_one_output_file_is_written(call: Any, tmp_path: Path) -> None:
    words = ("--save", str(tmp_path / "a.kv"), "--cache-prompt", str(tmp_path / "b.kv"))
    code, out, error = call(*SHORT, *words)
    assert (code, out) == (2, "") and "--save with --cache-prompt" in error


def test_reply_ends_before_a_stop_string(call: Any) -> None:
    whole = json.loads(call(*SHORT, "--json")[1])["text"]
    end = whole[3:5]
    report = json.loads(call(*SHORT, "--stop", end, "--json")[1])
    assert report["text"] == whole[: whole.index(end)] and report["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_penalties_change_the_text(name: str, call: Any) -> None:
    plain = call("run", "--prompt", "a = a = a = a =", "--max-new-tokens", "16")[1]
    words = ("run", "--prompt", "a = a = a = a =", "--max-new-tokens", "16", f"--{name}-penalty")
    assert call(*words, "1.9")[1] != plain
    assert call(*words, "nan")[0] == 2


@pytest.fixture
def chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the bundled model a chat template."""
    loaded = checkpoints.load

    def load(*words: Any, **named: Any) -> Any:
        model, tokenizer = loaded(*words, **named)
        tokenizer.chat_template = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
        return model, tokenizer

    monkeypatch.setattr(checkpoints, "load", load)


FEW = ("--max-new-tokens", "6")
HINT = "the model has a chat template: use --chat "


def test_plain_prompt_is_continued_verbatim(
    call: Any, chat_template: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, error = call("run", "--prompt", "import os", *FEW, "--stats")
    assert code == 0 and out.startswith("import os")
    assert (
        error.startswith("prompt: a text to continue, without a template\n") and HINT not in error
    )
    report = json.loads(call("run", "--prompt", "import os", *FEW, "--json")[1])
    assert (report["chat"], out) == (False, "import os" + report["text"] + "\n")
    monkeypatch.setattr("kvant.cli.run.is_terminal", lambda: True)
    assert HINT in call("run", "--prompt", "import os", *FEW)[2]
    assert HINT not in call("run", "--prompt", "import os", *FEW, "--chat")[2]
    assert HINT not in call("run", "--prompt", "import os", *FEW, "--json")[2]


def test_chat_option_sends_the_prompt_as_a_message(call: Any, chat_template: None) -> None:
    code, chat_reply, error = call("run", "--prompt", "import os", "--chat", *FEW, "--stats")
    assert code == 0 and error.startswith("prompt: a message in the model's chat template\n")
    plain = call("run", "--prompt", "# import os\n", *FEW)[1]
    assert plain == "# import os\n" + chat_reply  # only a continued text is echoed
    assert json.loads(call("run", "--prompt", "import os", "--chat", *FEW, "--json")[1])["chat"]


def test_chat_needs_a_template(call: Any) -> None:
    code, out, error = call("run", "--prompt", "import os", "--chat", *FEW)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: --chat: this model has no chat template: drop --chat")


def test_saved_conversation_records_whether_it_is_a_chat(
    call: Any, chat_template: None, tmp_path: Path
) -> None:
    text, chat = str(tmp_path / "text.kv"), str(tmp_path / "chat.kv")
    assert call("run", "--prompt", "import os", *FEW, "--save", text)[0] == 0
    assert call("run", "--prompt", "import os", "--chat", *FEW, "--save", chat)[0] == 0
    more = ("--prompt", "def f", *FEW, "--json")
    assert not json.loads(call("run", "--load", text, *more)[1])["chat"]
    assert json.loads(call("run", "--load", chat, *more)[1])["chat"]
    assert json.loads(call("run", "--load", chat, *more, "--chat")[1])["chat"]
    code, _, error = call("run", "--load", text, *more, "--chat")
    assert code == 2 and f"--chat with --load {text}: " in error


def test_message_is_not_prefilled_without_a_reply(call: Any, tmp_path: Path) -> None:
    words = ("--strategy", "disabled", "--cache-prompt", str(tmp_path / "read.kv"))
    code, _, error = call("run", "--prompt", "import os", *words)
    assert code == 2 and "--cache-prompt with --strategy disabled" in error
    words = ("--chat", "--cache-prompt", str(tmp_path / "read.kv"))
    code, _, error = call("run", "--prompt", "import os", *words)
    assert code == 2 and error.startswith("error: --chat with --cache-prompt: ")


def test_memory_is_reported_relative_to_raw(call: Any) -> None:
    text = "import os\n" * 200
    words = ("--max-new-tokens", "2", "--kv-cache", "affine4", "--stats")
    error = call("run", *words, typed=text)[2]
    assert " of raw, " in error and error.endswith(" saved\n")
