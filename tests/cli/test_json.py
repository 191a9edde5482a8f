"""Test `--json`: one object on standard output and nothing else, for every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from generation.test_tools_as_text import CHATML
from hf.zoo import build
from kvant import Cache, save
from kvant.bench.cache_race import MODEL_SHAPES
from kvant.cli.main import BENCHES, app
from kvant.cli.store import store
from kvant.stores import Blob, BlobPayload, FolderStore, pack_blob
from server.speaking import make_character_tokenizer

HELD = BlobPayload.from_fields({"0/keys": torch.ones(3)})
BLOB = Blob("ab/" + "0" * 64, "k0-1", "ab/" + "1" * 64, (1, 2), HELD)
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 1000,
}
COMMANDS = {
    "run": ("--prompt", "def f", "--max-new-tokens", "3", "--stats"),
    "chat": ("--max-new-tokens", "3", "--stats"),
    "batch": ("p.jsonl", "--out", "replies", "--max-new-tokens", "3", "--no-guard"),
    "formats": (),
    "formats affine4/turbo3,window=64": (),
    "doctor": (),
    "plan": ("--budget", "1GB"),
    "inspect": ("a.kv",),
    "inspect --kv-cache affine4": (),
    "eval": (
        *("--formats", "affine8", "--tokens", "700"),
        *("--context", "350", "--prompts", "1"),
    ),
    "recommend": ("--formats", "affine8", "--context", "512"),
    "store ls": ("prefixes",),
    "store stats": ("prefixes",),
    "store verify": ("prefixes",),
    "store prune": ("prefixes", "--max-bytes", "1GB"),
    "bench agents": ("--sessions", "compaction", "--turns", "4", "--system", "20"),
    "bench append": ("--lengths", "8", "--tokens", "2", "--heads", "1", "--dim", "32"),
    "bench attend": ("--lengths", "64", "--formats", "affine8", "--repeats", "1"),
    "bench batch": (
        *("--sequences", "1,2", "--context", "8", "--formats", "raw"),
        *("--repeats", "1", "--layers", "1"),
    ),
    "bench decode": (
        *("--formats", "raw", "--lengths", "8", "--prompt", "4"),
        *("--tokens", "2", "--runs", "1", "--repeats", "2"),
    ),
    "bench engine": (
        *("--sequences", "2", "--context", "4", "--tokens", "12"),
        *("--layers", "1"),
    ),
    "bench conversations": (
        *("--users", "2", "--memory", "1", "--turns", "2", "--shared", "64"),
        *("--message", "4", "--reply", "2", "--layers", "1"),
    ),
    "bench serve": (
        *("--clients", "1,2", "--context", "4", "--tokens", "3", "--rounds", "1"),
        *("--layers", "1", "--trim-every", "0.01"),
    ),
    "bench weights": ("--shapes", "128x64", "--rows", "1,40", "--repeats", "1"),
    "bench scale": ("--requests", "500", "--replicas", "2,4"),
    "bench stores": ("--context", "128", "--repeats", "1", "--layers", "1"),
    "bench prefixes": ("--shared", "64", "--own", "2", "--repeats", "1", "--layers", "1"),
    "bench gpu": ("--rehearse",),
    "bench prefill": (
        *("--formats", "affine8", "--prompt", "80"),
        *("--chunks", "80", "--repeats", "1"),
    ),
}


def load_tiny(name: str) -> tuple[Any, Any]:
    tokenizer = make_character_tokenizer()
    tokenizer.chat_template = CHATML
    return build("llama", max_position_embeddings=1 << 14), tokenizer


def test_every_command_is_covered() -> None:
    named = {str(command.name or command.callback.__name__) for command in app.registered_commands}
    named |= {f"bench {name}" for name in BENCHES}
    named |= {
        f"store {command.name or command.callback.__name__}"
        for command in store.registered_commands
    }
    assert named - {"serve"} <= COMMANDS.keys()  # runs until it is stopped


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_object_and_nothing_else(
    command: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "bench gpu":
        pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODEL_SHAPES, "0.6b", MODEL_SHAPES["0.6b"] | SMALL)
    monkeypatch.setattr("kvant.bench.agents.load", load_tiny)
    monkeypatch.setattr("kvant.bench.weights.MIN_WEIGHT_BYTES", 10**6)
    monkeypatch.setattr("kvant.bench.gpu.FORMATS", ("fp8",))
    monkeypatch.setattr("kvant.bench.gpu.MIN_SPEEDUPS", {"affine8": 1.5})
    save(Cache(2, "affine8"), "a.kv")
    FolderStore("prefixes", min_free=0).put(BLOB.page, BLOB.part, pack_blob(BLOB))
    Path("p.jsonl").write_text('{"prompt": "def f"}\n')
    words = (*command.split(), *COMMANDS[command], "--json")
    code, out, _ = call(*words, typed="import os\n/stats\n")
    assert code == 0 and out.count("\n") == 1
    assert isinstance(json.loads(out), dict)
