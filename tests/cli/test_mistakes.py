"""Test user errors: one line, exit code 2, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvant import Cache, save
from kvant.demo import PATH

FORMATS = [
    "afine4",
    "affine7",
    "affine",
    "affine4v",
    "affine4v9",
    "affine-4",
    "turbo5",
    "turbo1v1",
    "fp9",
    "raw4",
    "q9_0",
    "int3x",
    "bf32",
]
OPTIONS = [
    "window",
    "window=",
    "window=0",
    "window=-1",
    "window=4k",
    "window=1.5",
    "window=1e3",
    "sinks=-1",
    "sinks=x",
    "tail=-2",
    "start=no",
    "page=63",
    "page=0",
    "page=100",
    "slack=-1",
    "step=0",
    "capacity=0",
    "capacity=many",
    "group=7",
    "group=0",
    "edge=x",
    "edge=2:affine9",
    "seed=x",
    "prefill=often",
    "select=0",
    "select=0%",
    "select=101%",
    "select=x",
    "prune=snap:25%",
    "prune=snapkv",
    "prune=snapkv:0",
    "prune=snapkv:25%:fast",
    "windw=64",
    "rotate=1",
    "smooth=2",
    "window=64,window=64",
    "rotate,rotate",
    "prune=tova:25%,window=64",
    "nonsense",
]
SPECS = [
    *FORMATS,
    *(f"affine4,{option}" for option in OPTIONS),
    *("", ",", "affine4,", "affine4,,window=4", "window=64", "raw,rotate", "raw,group=32"),
    *("fp8,group=32", "bf16/f16", "affine4/", "/affine4", "affine4/nothing", "auto:", "auto:much"),
    *("auto,max_kl", "auto,max_kl=x", "auto,affine4", "affine4,window=64,capacity=32"),
]
DRAWN = [
    ("--temperature", "-1"),
    ("--temperature", "nan"),
    ("--temperature", "hot"),
    ("--top-p", "1.5"),
    ("--top-p", "-0.1"),
    ("--top-k", "0"),
    ("--top-k", "1.5"),
    ("--min-p", "2"),
    ("--seed", "x"),
    ("--seed", str(2**65)),
    ("--max-new-tokens", "0"),
    ("--max-new-tokens", "-3"),
    ("--max-new-tokens", "few"),
    ("--max-context", "1"),
    ("--stop", ""),
    ("--repetition-penalty", "0"),
    ("--repetition-penalty", "inf"),
    ("--presence-penalty", "nan"),
    ("--frequency-penalty", "x"),
]
HOW = [
    ("--device", "tpu"),
    ("--device", "cuda:99"),
    ("--dtype", "int8"),
    ("--backend", "fast"),
    ("--strategy", "sometimes"),
    ("--budget", "64MiB"),
    ("--strategy", "adaptive"),
    ("--strategy", "adaptive", "--budget", "lots"),
    ("--threshold", "x"),
    ("--prefill-chunk", "0"),
    ("--draft", "./nowhere"),
    ("--store", "gopher://here"),
    ("--store", "kept", "--budget", "1MiB"),
    ("--kv-window-keep", "4"),
    ("--kv-window-size", "64", "--kv-cache", "raw,window=64"),
    ("--nonsense",),
    ("nonsense",),
]
FILES = [
    ("--model", "./nowhere"),
    ("--model", "empty"),
    ("--model", "text.txt"),
    ("--model", "model.gguf"),
    ("--model", "halved"),
    ("--file", "nowhere.txt"),
    ("--file", "."),
    ("--file", "noise"),
    ("--file", "text.txt", "--prompt", "def"),
    ("--prompt", ""),
    ("--load", "nowhere.kv"),
    ("--load", "text.txt"),
    ("--load", "noise"),
    ("--load", "cut.kv"),
    ("--load", "cache.kv"),
    ("--load", "cache.kv", "--kv-cache", "affine4"),
    ("--save", "."),
    ("--save", "no/folder/a.kv"),
    ("--cache-prompt", "no/folder/a.kv"),
]
OTHERS = [
    ("chat", "--system", "be brief", "--load", "cache.kv"),
    ("batch", "nowhere.jsonl", "--out", "out"),
    ("batch", "text.txt", "--out", "out"),
    ("batch", "odd.jsonl", "--out", "out"),
    ("batch", "prompts.jsonl"),
    ("batch", "prompts.jsonl", "--out", "out", "--max-bytes", "lots"),
    ("serve", "--port", "x"),
    ("serve", "--host", "0.0.0.0"),
    ("serve", "--api-keys", "nowhere"),
    ("serve", "--kv-cache", "afine4"),
    ("serve", "--max-bytes", "lots"),
    ("serve", "--adapter", "poet"),
    ("serve", "--adapter", "poet=nowhere"),
    ("plan", "--config", "nowhere.json"),
    ("plan", "--config", "text.txt"),
    ("plan", "--model", "empty"),
    ("plan", "--context", "0"),
    ("plan", "--sequences", "0"),
    ("plan", "--budget", "8 parsecs"),
    ("plan", "--kv-cache", "afine4"),
    ("inspect", "nowhere.kv"),
    ("inspect", "text.txt"),
    ("inspect", "noise"),
    ("inspect", "cut.kv"),
    ("inspect", "cache.kv", "--model", "empty"),
    ("eval", "--formats", "afine4"),
    ("eval", "--text", "nowhere.txt"),
    ("eval", "--tokens", "0"),
    ("eval", "--save", "no/folder/a.jsonl"),
    ("formats", "afine4"),
    ("store", "stats", "nowhere"),
    ("store", "verify", "nowhere"),
    ("store", "prune", "nowhere", "--max-bytes", "1GB"),
    ("bench", "nonsense"),
    ("bench", "attend", "--lengths", "many"),
    ("bench", "attend", "--formats", "afine4"),
    ("bench", "decode", "--formats", "afine4"),
    ("bench", "prefill", "--formats", "afine4"),
    ("bench", "append", "--lengths", "1,x"),
    ("bench", "weights", "--shapes", "12"),
    ("bench", "engine", "--tokens", "1"),
    ("nonsense",),
]
CASES = [
    *(("run", "--prompt", "def", f"--kv-cache={spec}") for spec in SPECS),
    *(("run", "--prompt", "def", *words) for words in (*DRAWN, *HOW)),
    *(("run", *words) for words in FILES),
    *OTHERS,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files that are no models, no texts and no caches."""
    base = tmp_path_factory.mktemp("mistakes")
    (base / "text.txt").write_text("no cache")
    (base / "noise").write_bytes(b"\xff\xfe\x00\x81" * 100)
    (base / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    (base / "empty").mkdir()
    save(Cache(2, "affine8"), base / "cache.kv")
    (base / "cut.kv").write_bytes((base / "cache.kv").read_bytes()[:-7])
    (base / "halved").mkdir()
    for file in (path for path in PATH.iterdir() if path.is_file()):  # not __pycache__
        whole = file.read_bytes()
        cut = len(whole) // 2 if file.suffix == ".safetensors" else len(whole)
        (base / "halved" / file.name).write_bytes(whole[:cut])
    (base / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (base / "odd.jsonl").write_text('{"prompt": "a", "tempreature": 1}\n')
    return base


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_user_error_is_one_line(
    words: tuple[str, ...], folder: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **named: Any) -> None:
        raise AssertionError("a checkpoint is loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    monkeypatch.chdir(folder)
    before = sorted(path.name for path in folder.iterdir())
    code, out, error = call(*words)
    assert (code, out, error.count("\n")) == (2, "", 1), (code, out, error)
    assert error.startswith("error: ") and "Traceback" not in error and len(error) < 600
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--host", "0.0.0.0"), "without keys: anyone on the network"),
        (("--api-keys", "nowhere"), "--api-keys nowhere: there is no such file"),
        (("--kv-cache", "affine99"), "affine99"),
        (("--max-bytes", "many"), "many"),
        (("--model", "nowhere"), "--model nowhere"),
    ],
)
def test_server_reports_the_user_error(
    words: tuple[str, ...], message: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVANT_API_KEYS", raising=False)
    # retries for half a minute
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, error = call("serve", *words)
    assert code == 2 and message in error and error.count("\n") == 1


def test_all_recorded_user_errors_are_covered() -> None:
    assert len(set(CASES)) == len(CASES) >= 110
    assert json.dumps(CASES)
