"""Test `kvant inspect` as installed: a saved cache and a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.tagged import make_layer
from hf.zoo import FAMILIES
from kvant import Cache, CacheFileError, CacheSpec, GroupSpec, RecurrentSpec, SharedSpec, save
from kvant.cache.files import read_header
from kvant.contracts import Snapshot

MIXED = CacheSpec(
    (
        make_layer("affine4,sinks=4"),
        make_layer("affine4,sinks=4"),
        make_layer("raw,window=128"),
        SharedSpec(0),
        RecurrentSpec(),
        GroupSpec((("attention", make_layer("turbo4v2")), ("recurrence", RecurrentSpec()))),
    )
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a cache with every type of layer, with 300 tokens of two sequences."""
    cache = Cache(None, MIXED)
    rows = torch.randn(2, 2, 3, 300, 64, generator=torch.Generator().manual_seed(0))
    for index in (0, 1, 2):
        cache[index].append(*rows)
    state = {"conv": torch.ones(2, 4)}
    cache[4].append(300, state)
    group = cache[5]
    group["attention"].append(*rows)
    group["recurrence"].append(300, state)
    path = tmp_path / "chat.kv"
    save(cache, path, about={"session": "a", "tokens": [1, 2]})
    return path


def test_a_header_is_read_without_tensors(file: Path) -> None:
    head = read_header(file)
    assert (head.version, head.spec) == (2, MIXED)
    assert head.about == {"session": "a", "tokens": [1, 2]}
    assert head.padded_lengths == (300, 300) and head.numbers["4/now"] == 300
    stored = head.tensors["0/keys.codes"]  # two pages per sequence, 128 rows stay dense
    assert (stored.dtype, stored.shape) == ("U8", (4, 3, 64, 32))
    assert sum(tensor.nbytes for tensor in head.tensors.values()) < file.stat().st_size


def test_metadata_is_printed_without_control_characters(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    save(Cache(1), path, about={"note\x1b[2J": "\x1b]0;title"})
    code, out, _ = call("inspect", str(path))
    assert code == 0 and "\x1b" not in out and "note?[2J (?]0;title)" in out


def test_saved_cache_is_described(call: Any, file: Path) -> None:
    code, out, error = call("inspect", str(file))
    assert (code, error) == (0, "")
    assert "checksum: SHA-256 verified\n" in out
    assert "tokens: 300\n" in out and "sequences: 2\n" in out
    assert "about: session (a), tokens ([1, 2])\n" in out
    lines = [line.rstrip() for line in out.splitlines()]
    heads = lines.index("") + 1
    assert lines[heads].split() == ["layers", "kind", "rows", "stored", "bytes", "a", "layer"]
    assert lines[heads + 1].startswith("0-1     attention")
    assert "3 heads of 64, F32" in lines[heads + 1]
    assert "affine4, 4 dense sinks" in lines[heads + 1]
    assert "raw, window 128" in lines[heads + 2]
    assert "the rows of layer 0" in lines[heads + 3] and lines[heads + 3].endswith("0 B")
    assert "recurrent" in lines[heads + 4]
    assert "turbo4v2 and a recurrent state" in lines[heads + 5]


def test_saved_cache_is_described_as_json(call: Any, file: Path) -> None:
    code, out, _ = call("inspect", str(file), "--json")
    report = json.loads(out)
    assert (code, report["tokens"], report["sequences"]) == (0, 300, 2)
    assert report["nbytes"] == file.stat().st_size
    assert report["about"] == {"session": "a", "tokens": [1, 2]}
    assert [line["layers"] for line in report["layers"]] == [[0, 1], [2], [3], [4], [5]]
    whole = sum(len(line["layers"]) * line["nbytes"] for line in report["layers"])
    assert whole == sum(tensor.nbytes for tensor in read_header(file).tensors.values())


def test_empty_cache_is_described(call: Any, tmp_path: Path) -> None:
    save(Cache(2, "affine8"), tmp_path / "empty.kv")
    code, out, _ = call("inspect", str(tmp_path / "empty.kv"), "--json")
    report = json.loads(out)
    assert (code, report["tokens"], report["sequences"]) == (0, 0, None)


def test_bundled_model_is_described(call: Any) -> None:
    code, out, _ = call("inspect", "--kv-cache", "affine4,sinks=2", "--json")
    report = json.loads(out)
    assert (code, report["class"], report["max_context"]) == (0, "Qwen3ForCausalLM", 2048)
    assert (report["tokens"], report["nbytes_per_token"]) == (2048, 960)
    (line,) = report["layers"]
    assert line["layers"] == list(range(6)) and line["stored"] == "affine4, 2 dense sinks"
    assert line["rows"] == "2 heads of 64, bfloat16" and line["read"] == "native"
    assert report["nbytes"] == 6 * line["nbytes"]
    assert report["explanation"][0].startswith("layers 0-5, full_attention: affine4")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma3", [[0, 1, 3], [2]]),
        ("gemma3n", [[0], [1], [2, 3]]),
        ("jamba", [[0, 2], [1, 3]]),
        ("deepseek_v32", [[0, 1, 2, 3]]),
        ("t5", [[0, 1, 2]]),
    ],
)
def test_a_folder_without_weights_is_enough(
    name: str, expected: list[list[int]], call: Any, tmp_path: Path
) -> None:
    FAMILIES[name].config().save_pretrained(tmp_path)
    code, out, _ = call("inspect", "--model", str(tmp_path), "--json")
    assert code == 0
    assert [line["layers"] for line in json.loads(out)["layers"]] == expected
    code, out, error = call("inspect", "--model", str(tmp_path))
    assert (code, error) == (0, "") and ("unknown" in out) == (name == "deepseek_v32")


def test_position_bias_is_read_by_the_reference(call: Any, tmp_path: Path) -> None:
    FAMILIES["t5"].config().save_pretrained(tmp_path)
    (line,) = json.loads(call("inspect", "--model", str(tmp_path), "--json")[1])["layers"]
    assert line["read"] == "reference"


def test_corrupt_file_is_one_line_and_nothing_else(call: Any, file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-7] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CacheFileError, match="checksum"):
        read_header(file)
    for words in ((str(file),), (str(file), "--json")):
        code, out, error = call("inspect", *words)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert "corrupt: its checksum does not match" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere.kv",), "cannot be read: No such file"),
        ((".",), "cannot be read: Is a directory"),
        (("text.kv",), "not a kvant cache"),
        (("short.kv",), "corrupt"),
        (("chat.kv", "--model", "a"), "the file has its own"),
        (("chat.kv", "--kv-cache", "raw"), "the file has its own"),
        (("--kv-cache", "affine9"), "nearest: affine8"),
        (("--model", "./nowhere"), "no such folder"),
    ],
    ids=str,
)
def test_user_error_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, call: Any, file: Path
) -> None:
    monkeypatch.chdir(file.parent)
    Path("text.kv").write_text("a text")
    Path("short.kv").write_bytes(file.read_bytes()[:-100])
    code, out, error = call("inspect", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.zeros(2)], ids=["number", "row"])
@pytest.mark.parametrize("name", ["0/numbers", "0/keys.open"])
def test_tensor_with_too_few_dimensions_gives_no_traceback(
    name: str, tensor: Tensor, call: Any, tmp_path: Path
) -> None:
    """Such a file is easy to forge; loading it is refused."""
    cache = Cache(1, "raw")
    cache[0].append(*torch.randn(2, 1, 1, 3, 8))
    shared_snapshot = cache.shared_snapshot()
    other = Snapshot({**shared_snapshot.tensors, name: tensor}, shared_snapshot.numbers)
    save(SimpleNamespace(spec=cache.spec, shared_snapshot=lambda: other), tmp_path / "forged.kv")
    code, _, error = call("inspect", str(tmp_path / "forged.kv"))
    assert (code, error) == (0, "")
