"""`kvant run`, as it is installed: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import os
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


def test_it_continues_a_prompt(call: Any) -> None:
    code, out, error = call(*SHORT, "--kv-cache", "affine4")
    assert code == 0 and error.startswith("trying affine4 on the model (at most ")
    assert error.endswith("--no-guard skips it)\n") and error.count("\n") == 1
    assert call(*SHORT, "--kv-cache", "affine4") == (0, out, "")  # its verdict is known
    assert out.startswith("import os\n") and len(out) > len("import os\n") + 1


def test_json_is_one_object(call: Any) -> None:
    words = ("run", "--prompt", "def f", "--max-new-tokens", "4", "--json", "--seed", "1")
    code, out, _ = call(*words)
    told = json.loads(out)
    assert (code, told["prompt"], told["tokens"]) == (0, "def f", 4)
    assert told["finish_reason"] == "length"
    assert told["cache"]["materialized"] == 0


def test_statistics_go_to_standard_error(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompt.py"
    file.write_text("class A:\n")
    code, out, error = call("run", "--file", str(file), "--max-new-tokens", "3", "--stats")
    assert (code, out[:9]) == (0, "class A:\n")
    prompt, figures = error.splitlines()
    assert prompt == "prompt: a text, continued as it is"
    assert figures.startswith("3 tokens") and "raw: " in figures


@pytest.mark.parametrize("words", [("-",), ("--prompt", "-")])
def test_a_prompt_can_be_piped(words: tuple[str, ...], call: Any) -> None:
    code, out, error = call("run", *words, "--max-new-tokens", "3", typed="class A:\n")
    assert (code, out[:9], error) == (0, "class A:\n", "")


def test_what_is_piped_in_is_the_prompt(call: Any) -> None:
    """`echo 'class A:' | kvant run` continued a prompt of our own."""
    code, out, error = call("run", "--max-new-tokens", "3", typed="class A:\n")
    assert (code, out[:9], error) == (0, "class A:\n", "")
    plain = call("run", "--max-new-tokens", "3", typed="")
    assert plain[0] == 0 and plain[1].startswith(DEFAULT_PROMPT)
    assert call(*SHORT, typed="class A:\n") == call(*SHORT)


def test_what_is_piped_in_goes_on_behind_a_file(call: Any, tmp_path: Path) -> None:
    file, few = str(tmp_path / "a.kv"), ("--max-new-tokens", "3")
    call(*SHORT, "--save", file)
    told = call("run", "--load", file, *few, "--prompt", "class A")
    assert call("run", "--load", file, *few, typed="class A") == told
    assert told[1].startswith("class A") and told[0] == 0


@pytest.mark.parametrize(
    "stdin",
    [
        *("</dev/null", "<noise"),
        *(pytest.param(stdin, marks=pytest.mark.laws) for stdin in ("<&-", "0>/dev/null")),
    ],
)
def test_no_standard_input_is_no_prompt(stdin: str, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"\xff\xfe")
    line = f'exec "$@" {stdin}'
    words = ["sh", "-c", line, "sh", KVANT, "run", "--max-new-tokens", "1"]
    words += ["--dtype", "float32"]  # no line about a slow one
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    if stdin == "<noise":
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: the prompt is no text in UTF-8\n"
    else:
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(DEFAULT_PROMPT)


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
def test_strategies_and_drafts_say_the_same(words: tuple[str, ...], call: Any) -> None:
    plain = call(*SHORT)
    assert plain[0] == 0
    assert call(*SHORT, *words) == plain


def test_auto_says_what_it_took(call: Any) -> None:
    code, out, error = call(*SHORT, "--kv-cache", "auto", "--json")
    told = json.loads(out)
    first, chosen, head, *rows = error.splitlines()
    assert code == 0 and first.startswith("auto: trying formats") and chosen.startswith("auto: ")
    assert head.split() == [
        "tried",
        "bytes",
        "a",
        "token",
        "KL",
        "top-1",
        "recall",
        "lost",
        "verdict",
    ]
    assert [row.split()[1] for row in rows if row.startswith("*")] == [chosen.split()[1]]
    assert rows[0].split()[0] == "turbo2" and rows[0].endswith("changes predictions")
    assert told["kv_cache"].startswith("turbo") and "warning" not in error


def test_a_context_can_be_told(call: Any) -> None:
    code, out, _ = call("run", "--prompt", "def f", "--max-context", "12", "--json")
    told = json.loads(out)
    assert (code, told["cache"]["length"], told["finish_reason"]) == (0, 11, "length")


def test_a_window_can_be_two_flags(call: Any) -> None:
    flags = ("--kv-window-size", "8", "--kv-window-keep", "2", "--max-new-tokens", "20")
    told = json.loads(call(*SHORT, *flags, "--kv-cache", "affine8", "--json")[1])
    assert told["kv_cache"] == "affine8,window=8,sinks=2"
    assert told["cache"]["length"] > told["cache"]["held"] == 8 + 2


def test_a_text_goes_on_where_it_was_saved(call: Any, tmp_path: Path) -> None:
    file, words = str(tmp_path / "a.kv.safetensors"), ("--kv-cache", "affine4")
    first = call(*SHORT, *words, "--save", file)[1].removesuffix("\n")
    code, rest, _ = call("run", "--load", file, "--max-new-tokens", "6")
    assert code == 0
    whole = call("run", "--prompt", "import os\n", "--max-new-tokens", "12", *words)[1]
    assert first + rest == whole


@pytest.mark.parametrize("heads", ["", ":adaptive"])
def test_what_stays_of_a_prompt_is_saved(call: Any, tmp_path: Path, heads: str) -> None:
    file, text = str(tmp_path / "a.kv.safetensors"), "import os\nfrom sys import argv\n" * 12
    words = ("run", "--prompt", text, "--kv-cache", f"affine4,prune=snapkv:20%{heads}")
    first = call(*words, "--max-new-tokens", "6", "--save", file)[1].removesuffix("\n")
    code, rest, _ = call("run", "--load", file, "--max-new-tokens", "6")
    assert (code, first + rest) == (0, call(*words, "--max-new-tokens", "12")[1])
    told = call("inspect", file, "--json")[1]
    assert json.loads(told)["sequences"] == 1 and "2 heads of 64" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--kv-cache", "affine9"), "nearest: affine8"),
        (("--kv-cache", "raw,window=-3"), "window"),
        (("--kv-window-size", "-3"), "window=-3"),
        (("--kv-window-size", "9", "--kv-cache", "raw,window=8"), "says window= too"),
        (("--kv-window-keep", "9", "--kv-cache", "raw,window=8,sinks=1"), "says sinks= too"),
        (("--kv-window-keep", "3"), "give --kv-window-size too"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "\udcff"), "no text in UTF-8"),
        (("--draft", "./nowhere"), "--draft ./nowhere: there is no such folder"),
        (("-",), "the prompt is empty"),
        (("hello",), "a prompt is given with --prompt"),
        (("--file", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("--file", "noise.bin"), "it is no text"),
        (("--file", "a", "--prompt", "b"), "give one of them"),
        (("--model", "./nowhere"), "there is no such folder"),
        (("--model", "."), "there is no config.json in this folder"),
        (("--model", "broken"), "broken/model.safetensors is damaged or not whole"),
        (("--prompt", "word " * 3000), "for a context of 2048"),
        (("--top-p", "7"), "top_p=7"),
        (("--strategy", "often"), "allowed are always, disabled, long, adaptive"),
        (("--strategy", "adaptive"), "needs budget="),
        (("--strategy", "adaptive", "--budget", "5 apples"), "5 apples"),
        (("--load", "nowhere.kv"), "there is no such file"),
        (("--load", "noise.bin"), "noise.bin: not a kvant cache"),
        (("--load", "other.kv"), "holds 4 layers of 2 heads of 16, and --model has 6 layers of"),
        (("--load", "plain.kv"), "no conversation"),
        (("--load", "altered.kv"), "checksum"),
        (("--load", "other.kv", "--kv-cache", "raw"), "the file says how it is kept"),
        (("--save", "nowhere/a.kv"), "in a folder that exists"),
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
def test_a_mistake_is_one_line_and_exit_code_2(
    words: tuple[str, ...], told: str, call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_wrong_files(tmp_path)
    code, out, error = call("run", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and told in error


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
def test_a_mistake_is_found_before_a_model_is_loaded(
    command: str, words: tuple[str, ...], call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(checkpoints, "load", load)
    monkeypatch.chdir(tmp_path)
    _write_wrong_files(tmp_path)
    code, out, error = call(command, *words)
    assert (code, out, error.count("\n")) == (2, "", 1)


def test_a_file_of_the_same_shape_is_refused_by_its_weights(call: Any, tmp_path: Path) -> None:
    file = str(tmp_path / "a.kv")
    call(*SHORT, "--save", file)
    code, out, error = call("run", "--load", file, "--dtype", "float32")
    assert (code, out) == (2, "") and "with this one in another dtype" in error


def test_a_dtype_and_a_device_can_be_told(call: Any) -> None:
    told = json.loads(call(*SHORT, "--json")[1])
    wide = json.loads(call(*SHORT, "--json", "--dtype", "float32", "--device", "cpu")[1])
    assert wide["cache"]["nbytes"] == 2 * told["cache"]["nbytes"]


def test_a_prompt_is_read_in_chunks_of_a_size(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    logits = TransformersDecoder.compute_logits

    def counted(self: Any, ids: list[int], *args: Any, **kwargs: Any) -> Any:
        read.append(len(ids))
        return logits(self, ids, *args, **kwargs)

    monkeypatch.setattr(TransformersDecoder, "compute_logits", counted)
    whole = call("run", "--prompt", "a b c d e f g", "--max-new-tokens", "2")
    assert (
        call("run", "--prompt", "a b c d e f g", "--max-new-tokens", "2", "--prefill-chunk", "3")
        == whole
    )
    count = read.index(1)
    assert read[count + 1 : -1] == [3] * (read[0] // 3) + ([read[0] % 3] if read[0] % 3 else [])


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


def test_a_full_disk_leaves_the_older_file(call: Any, tmp_path: Path) -> None:
    """The operating system stands in for the disk: no file may grow beyond 20 KB."""
    file = tmp_path / "a.kv.safetensors"
    words = [KVANT, *SHORT, "--dtype", "float32", "--save", str(file)]
    assert call(*words[1:])[0] == 0
    before = file.read_bytes()

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = subprocess.run(words, capture_output=True, text=True, preexec_fn=full, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: ")
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == [file.name]


def test_a_memory_under_a_budget_tells_its_steps_down(call: Any) -> None:
    words = ("run", "--prompt", "def f", "--max-new-tokens", "220", "--strategy", "adaptive")
    words += ("--budget", "700KiB", "--seed", "1")
    told = json.loads(call(*words, "--json")[1])
    cache = told["cache"]
    (step,) = cache["recoded"]
    assert (step["from"], step["to"], cache["recodes"]) == ("raw", "affine8", 1)
    assert cache["nbytes"] <= 700 * 1024 and step["nbytes_after"] < step["nbytes_before"]
    _, _, error = call(*words, "--stats")
    assert f"at {step['length']} tokens: raw to affine8, 576 KiB to " in error
    assert error.splitlines()[-1].partition("; ")[2].startswith("affine8: ")
    assert told["kv_cache"] == "affine8"


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_model_is_packed_where_nobody_says_otherwise(
    command: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[kvant.Packing] = []
    pack = kvant.pack
    monkeypatch.setattr("kvant.weights.pack", lambda model: packed.append(pack(model)))
    words = {"run": (*SHORT, "--device", "cpu"), "chat": ("chat", "--max-new-tokens", "6")}[command]
    first = call(*words, typed="import os\n")
    assert first[0] == 0 and len(packed) == 1
    assert call(*words, "--no-pack", typed="import os\n") == first
    assert len(packed) == 1
    assert call(*words, "--draft", demo.PATH, typed="import os\n")[0] == 0
    assert len(packed) == 3


def test_a_prompt_is_read_now_and_continued_later(call: Any, tmp_path: Path) -> None:
    file, few = str(tmp_path / "read.kv"), ("--max-new-tokens", "6")
    read = call("run", "--prompt", "import os\nimport sys\n", "--cache-prompt", file)
    assert read == (0, "", "")
    told = json.loads(call("run", "--load", file, "--prompt", "def f", *few, "--json")[1])
    whole = json.loads(call("run", "--prompt", "import os\nimport sys\ndef f", *few, "--json")[1])
    assert told["text"] == whole["text"]
    assert told["cache"]["tokens_reused"] > 0


def test_a_prompt_of_one_token_is_continued_too(call: Any, tmp_path: Path) -> None:
    """Its row comes with the next token, so the file has none."""
    file, few = str(tmp_path / "read.kv"), ("--max-new-tokens", "6", "--json")
    assert call("run", "--prompt", "P", "--cache-prompt", file) == (0, "", "")
    told = json.loads(call("run", "--load", file, "--prompt", "Q", *few)[1])
    assert told["text"] == json.loads(call("run", "--prompt", "PQ", *few)[1])["text"]


def test_of_a_chat_no_message_is_read_alone(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = checkpoints.load(None)
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    session = kvant.Session(model, tokenizer)
    list(session.send("import os\n", max_new_tokens=2))
    session.save(tmp_path / "chat.kv")
    monkeypatch.setattr(checkpoints, "load", None)  # nothing is loaded for a mistake
    words = ("--load", str(tmp_path / "chat.kv"), "--cache-prompt", str(tmp_path / "read.kv"))
    code, out, error = call("run", *words, "--prompt", "def ")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "--cache-prompt beside --load" in error and not (tmp_path / "read.kv").exists()


def test_one_file_is_written(call: Any, tmp_path: Path) -> None:
    words = ("--save", str(tmp_path / "a.kv"), "--cache-prompt", str(tmp_path / "b.kv"))
    code, out, error = call(*SHORT, *words)
    assert (code, out) == (2, "") and "--save beside --cache-prompt" in error


def test_a_reply_ends_before_a_text(call: Any) -> None:
    whole = json.loads(call(*SHORT, "--json")[1])["text"]
    end = whole[3:5]
    told = json.loads(call(*SHORT, "--stop", end, "--json")[1])
    assert told["text"] == whole[: whole.index(end)] and told["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_penalties_change_what_is_said(name: str, call: Any) -> None:
    plain = call("run", "--prompt", "a = a = a = a =", "--max-new-tokens", "16")[1]
    words = ("run", "--prompt", "a = a = a = a =", "--max-new-tokens", "16", f"--{name}-penalty")
    assert call(*words, "1.9")[1] != plain
    assert call(*words, "nan")[0] == 2


@pytest.fixture
def instruct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the model inside a chat template."""
    loaded = checkpoints.load

    def load(*words: Any, **named: Any) -> Any:
        model, tokenizer = loaded(*words, **named)
        tokenizer.chat_template = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
        return model, tokenizer

    monkeypatch.setattr(checkpoints, "load", load)


FEW = ("--max-new-tokens", "6")
HINT = "the model has a chat template: --chat "


def test_a_prompt_is_continued_as_it_is(
    call: Any, instruct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, error = call("run", "--prompt", "import os", *FEW, "--stats")
    assert code == 0 and out.startswith("import os")
    assert error.startswith("prompt: a text, continued as it is\n") and HINT not in error
    told = json.loads(call("run", "--prompt", "import os", *FEW, "--json")[1])
    assert (told["chat"], out) == (False, "import os" + told["text"] + "\n")
    monkeypatch.setattr("kvant.cli.run.is_terminal", lambda: True)
    assert HINT in call("run", "--prompt", "import os", *FEW)[2]
    assert HINT not in call("run", "--prompt", "import os", *FEW, "--chat")[2]
    assert HINT not in call("run", "--prompt", "import os", *FEW, "--json")[2]


def test_a_prompt_is_a_message_of_a_chat(call: Any, instruct: None) -> None:
    code, asked, error = call("run", "--prompt", "import os", "--chat", *FEW, "--stats")
    assert code == 0 and error.startswith("prompt: a message, by the model's chat template\n")
    plain = call("run", "--prompt", "# import os\n", *FEW)[1]
    assert plain == "# import os\n" + asked  # only a text that goes on is shown
    assert json.loads(call("run", "--prompt", "import os", "--chat", *FEW, "--json")[1])["chat"]


def test_a_chat_needs_a_template(call: Any) -> None:
    code, out, error = call("run", "--prompt", "import os", "--chat", *FEW)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: --chat: this model has no chat template: leave --chat out")


def test_a_saved_conversation_says_itself_whether_it_is_a_chat(
    call: Any, instruct: None, tmp_path: Path
) -> None:
    text, chat = str(tmp_path / "text.kv"), str(tmp_path / "chat.kv")
    assert call("run", "--prompt", "import os", *FEW, "--save", text)[0] == 0
    assert call("run", "--prompt", "import os", "--chat", *FEW, "--save", chat)[0] == 0
    more = ("--prompt", "def f", *FEW, "--json")
    assert not json.loads(call("run", "--load", text, *more)[1])["chat"]
    assert json.loads(call("run", "--load", chat, *more)[1])["chat"]
    assert json.loads(call("run", "--load", chat, *more, "--chat")[1])["chat"]
    code, _, error = call("run", "--load", text, *more, "--chat")
    assert code == 2 and f"--chat beside --load {text}: " in error


def test_no_message_is_read_without_a_reply(call: Any, tmp_path: Path) -> None:
    words = ("--chat", "--cache-prompt", str(tmp_path / "read.kv"))
    code, _, error = call("run", "--prompt", "import os", *words)
    assert code == 2 and error.startswith("error: --chat beside --cache-prompt: ")


def test_memory_is_told_beside_raw(call: Any) -> None:
    text = "import os\n" * 200
    words = ("--max-new-tokens", "2", "--kv-cache", "affine4", "--stats")
    error = call("run", *words, typed=text)[2]
    assert " of raw, " in error and error.endswith(" saved\n")
