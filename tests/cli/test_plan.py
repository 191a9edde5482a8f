"""Test `kvant plan` as installed: table, JSON object and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvant import demo, plan
from kvant.cli.formats import PLANNED_FORMATS

QWEN3_1_7B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 2048,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT = QWEN3_1_7B | {
    "model_type": "qwen3_next",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}


def write_config(folder: Path, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def test_assumed_dtype_is_reported(call: Any, tmp_path: Path) -> None:
    without_dtype = {name: value for name, value in QWEN3_1_7B.items() if name != "torch_dtype"}
    note = "assumed: rows are bfloat16, since the configuration names no dtype"
    for config, notes in ((QWEN3_1_7B, []), (without_dtype, [note])):
        report = json.loads(call("plan", "--config", write_config(tmp_path, config), "--json")[1])
        assert (report["dtype"], report["notes"]) == ("bfloat16", notes)
    assert call("plan", "--config", write_config(tmp_path, without_dtype))[1].endswith(f"{note}\n")


def test_table_lists_all_formats(call: Any, tmp_path: Path) -> None:
    words = (
        "--config",
        write_config(tmp_path, QWEN3_1_7B),
        "--context",
        "40960",
        "--budget",
        "8GiB",
    )
    code, out, error = call("plan", *words)
    title, heads, *rows, note = out.splitlines()
    assert (code, error) == (0, "")
    assert note.endswith(": more tokens fit than the 40960 this model supports")
    assert title.endswith("config.json: 28 layers of full_attention; bfloat16")
    assert heads.split("  ")[0] == "format" and heads.endswith("tokens in 8 GiB")
    assert [row.split()[0] for row in rows] == list(PLANNED_FORMATS)
    assert rows[0].split() == ["raw", "114688", "1", "4.38", "GiB", "1", "74880"]  # whole pages
    assert rows[1].split()[:3] == ["affine8", "60928", "0.5312"]
    assert rows[2].split()[:3] == ["affine8v4", "48384", "0.4219"]
    assert rows[5].split()[:3] == ["affine4", "35840", "0.3125"]
    assert "\x1b" not in out


def test_json_is_one_object(call: Any, tmp_path: Path) -> None:
    words = ["--config", write_config(tmp_path, QWEN3_1_7B), "--json", "--budget", "1GB"]
    specs = ["affine4,window=1024", "turbo3,sinks=4"]
    for spec in specs:
        words += ["--kv-cache", spec]
    code, out, _ = call("plan", *words, "--sequences", "3")
    report = json.loads(out)
    assert (code, report["context"], report["sequences"], report["max_context"]) == (
        0,
        8192,
        3,
        40960,
    )
    assert [row["kv_cache"] for row in report["formats"]] == specs
    for row in report["formats"]:
        planned = plan(QWEN3_1_7B, row["kv_cache"], sequences=3)
        assert row["nbytes"] == planned.nbytes
        assert row["nbytes_per_token"] == planned.nbytes_per_token
        assert row["largest_context"] == planned.largest_context(10**9)
    assert report["formats"][0]["largest_context"] is None


@pytest.mark.parametrize(
    ("spec", "stays"),
    [
        ("raw,window=64", "stores the last 64 tokens and the first 4"),
        ("raw,window=64,sinks=0", "stores the last 64 tokens"),
    ],
)
def test_kept_tokens_of_a_window_are_reported(spec: str, stays: str, call: Any) -> None:
    report = json.loads(call("plan", "--json", "--context", "512", "--kv-cache", spec)[1])
    assert report["notes"] == [f"{spec}: {stays}"]
    assert report["formats"][0]["nbytes"] == plan(demo.PATH, spec, context=512).nbytes


@pytest.mark.parametrize(
    ("spec", "full", "notes"),
    [
        ("affine4,window=64", 1, ["stores the last 64 tokens and the first 4"]),
        ("affine4,window=512", 1, ["stores the last 512 tokens and the first 4"]),
        ("affine4,window=512,sinks=0", 1, ["stores the last 512 tokens"]),
        ("affine4,window=1024,sinks=0", 1, ["stores the last 1024 tokens"]),
        ("affine4,window=512,sinks=0", 0, []),  # window of the model
        ("affine4,window=1024", 0, []),
        ("affine4,window=64", 0, ["stores the last 64 tokens"]),
        ("affine4,sinks=8", 1, []),
    ],
)
def test_window_narrower_than_the_model_s_gets_one_note(
    spec: str, full: int, notes: list[str], call: Any, tmp_path: Path
) -> None:
    """Layers with a window of 512, and `full` layers after them."""
    types = ["sliding_attention"] * 3 + ["full_attention"] * full
    config = QWEN3_1_7B | {"model_type": "gemma3_text", "sliding_window": 512}
    config |= {"layer_types": types, "num_hidden_layers": len(types)}
    words = ("--config", write_config(tmp_path, config), "--kv-cache", spec, "--context", "4096")
    report = json.loads(call("plan", *words, "--json")[1])
    assert [note for note in report["notes"] if "stores the last" in note] == [
        f"{spec}: {note}" for note in notes
    ]


def test_bundled_model_is_planned_by_default(call: Any) -> None:
    plain, named = (
        json.loads(call("plan", "--json", *words)[1]) for words in ((), ("--model", str(demo.PATH)))
    )
    assert plain["formats"] == named["formats"]
    assert (plain["context"], plain["notes"]) == (2048, [])  # the context length of the model
    report = json.loads(call("plan", "--json", "--context", "8192")[1])
    assert report["notes"] == ["8192 tokens are more than the 2048 this model supports"]


def test_weights_are_planned_within_the_budget(call: Any) -> None:
    words = ("plan", "--json", "--budget", "20MiB", "--kv-cache", "raw")
    plain, counted = (json.loads(call(*words, *more)[1]) for more in ((), ("--weights", "affine4")))
    assert plain["weight_nbytes"] is None and counted["weight_nbytes"] > 3 << 20
    contexts = [report["formats"][0]["largest_context"] for report in (plain, counted)]
    assert contexts[0] > contexts[1]
    assert "weights in affine4: 3.45 MiB" in counted["notes"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--weights", "affine4", "--budget", "1MiB"), "the weights take 3.45 MiB in affine4"),
        (("--weights", "int4"), "weights='int4': unknown"),
    ],
)
def test_impossible_weights_are_refused(words: Any, reason: str, call: Any) -> None:
    code, _, error = call("plan", *words)
    assert code == 2 and reason in error


def test_differing_layers_are_listed(call: Any, tmp_path: Path) -> None:
    code, out, _ = call("plan", "--config", write_config(tmp_path, QWEN3_NEXT))
    assert code == 0
    assert "21 layers of linear_attention, 7 of full_attention; bfloat16" in out
    assert "of recurrent states, at every length" in out
    lacking = QWEN3_NEXT | {"linear_conv_kernel_dim": None}
    code, out, _ = call("plan", "--config", write_config(tmp_path, lacking))
    assert code == 0
    assert "not counted: the state of 21 layers of linear_attention" in out


def test_uncounted_encoder_is_reported(call: Any, tmp_path: Path) -> None:
    t5 = {"is_encoder_decoder": True, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_model": 64}
    _, out, _ = call("plan", "--config", write_config(tmp_path, t5))
    assert "not counted: the rows of the encoder" in out


def test_formats_that_cannot_store_the_rows_are_omitted(call: Any, tmp_path: Path) -> None:
    odd = write_config(tmp_path, QWEN3_1_7B | {"head_dim": 100})
    code, out, _ = call("plan", "--config", odd)
    assert code == 0
    assert "left out: affine8, affine8v4, affine6" in out and "multiple of 8" in out
    code, out, error = call("plan", "--config", odd, "--kv-cache", "affine8")
    assert (code, out) == (2, "") and "multiple of 8" in error


def test_capacity_limits_the_planned_lengths(call: Any) -> None:
    _, out, _ = call("plan", "--json", "--kv-cache", "raw,capacity=100")
    assert json.loads(out)["context"] == 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-cache", "affine9"), "nearest: affine8"),
        (("--budget", "8 bananas"), "size"),
        (("--config", "nowhere.json"), "cannot be read: No such file"),
        (("--config", "."), "config.json cannot be read: No such file"),
        (("--config", "broken.json"), "is not JSON"),
        (("--config", "list.json"), "a JSON object is needed"),
        (("--config", "empty.json"), "num_hidden_layers"),
        (("--config", "a", "--model", "b"), "give one of them"),
        (("--model", "./nowhere"), "no such folder"),
        (("--model", "."), "this folder has no config.json"),
        (("--kv-cache", "raw,capacity=100", "--context", "101"), "capacity=100"),
    ],
    ids=str,
)
def test_user_error_is_one_line_and_exit_code_2(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, call: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("broken", "{"), ("list", "[]"), ("empty", "{}")):
        Path(f"{name}.json").write_text(text)
    code, out, error = call("plan", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and message in error


def test_config_file_is_read_without_transformers(tmp_path: Path) -> None:
    words = ["kvant", "plan", "--config", write_config(tmp_path, QWEN3_NEXT)]
    code = (
        f"import sys; sys.argv = {words!r}\n"
        "from kvant.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_budget_beyond_the_model_context_is_noted(call: Any, tmp_path: Path) -> None:
    words = ("plan", "--config", write_config(tmp_path, QWEN3_1_7B), "--kv-cache", "raw")
    words += ("--kv-cache", "affine4", "--kv-cache", "affine4,window=512", "--budget", "4GiB")
    out = call(*words)[1]
    note = "affine4, affine4,window=512: more tokens fit than the 40960 this model supports"
    assert out.splitlines()[-1] == note
    note = "affine4,window=512: more tokens fit than the 40960 this model supports"
    assert call(*words[:-1], "1GiB")[1].splitlines()[-1] == note
    assert "more tokens fit" not in call(*words[:-1], "16MiB")[1]


@pytest.mark.parametrize("spec", ["auto", "auto:1GiB,max_kl=0.01"])
def test_auto_does_not_hide_other_formats(spec: str, call: Any) -> None:
    code, out, error = call("plan", "--kv-cache", spec, "--kv-cache", "affine4", "--json")
    report = json.loads(out)
    assert (code, error, [row["kv_cache"] for row in report["formats"]]) == (0, "", ["affine4"])
    assert report["notes"][-1].startswith(f"{spec}: chosen by tests on the model")
    report = json.loads(call("plan", "--kv-cache", spec, "--json")[1])
    assert [row["kv_cache"] for row in report["formats"]] == list(PLANNED_FORMATS)


def test_auto_without_a_valid_size_is_refused(call: Any) -> None:
    code, out, error = call("plan", "--kv-cache", "auto:")
    assert (code, out) == (2, "") and "a size is needed after the colon" in error
