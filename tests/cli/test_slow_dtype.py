"""Test the warning about a slow dtype: once per command, on standard error."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

LINE = "warning: torch multiplies bfloat16 slowly"
FEW = ("--max-new-tokens", "2", "--no-guard", "--no-pack")


@pytest.fixture(params=["run", "chat", "batch", "serve"])
def words(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ...]:
    """Return the words of a command with a small request; `serve` ends at once."""
    pytest.importorskip("fastapi", reason="pip install 'kvant[server]'")
    ended = SimpleNamespace(run=lambda: None)
    monkeypatch.setattr("kvant.server.make_server", lambda *args: ended)
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "def f"}\n{"prompt": "import os"}\n')
    more = {"batch": (str(file), "--out", str(tmp_path / "out"))}
    return (request.param, *more.get(request.param, ()), *FEW)


@pytest.fixture
def slow_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvant.platform.devices.is_slow", lambda dtype, device: dtype == torch.bfloat16
    )


@pytest.mark.usefixtures("slow_dtype")
def test_each_command_warns_once(call: Any, words: tuple[str, ...]) -> None:
    code, out, error = call(*words, typed="import os\ndef f\n")
    assert code == 0 and error.count("slowly") == 1 and "slowly" not in out
    (line,) = [line for line in error.splitlines() if "slowly" in line]
    assert line.startswith(LINE) and "--dtype float32" in line


@pytest.mark.usefixtures("slow_dtype")
def test_json_has_no_extra_line(call: Any, words: tuple[str, ...]) -> None:
    if words[0] == "serve":
        assert call(*words, "--json")[0] == 2
        return
    code, out, error = call(*words, "--json", typed="import os\n")
    assert code == 0 and json.loads(out) and error.count("slowly") == 1


def test_fast_dtype_gives_no_warning(call: Any, words: tuple[str, ...], request: Any) -> None:
    assert "slowly" not in call(*words, typed="import os\n")[2]


@pytest.mark.usefixtures("slow_dtype")
def test_float32_gives_no_warning(call: Any, words: tuple[str, ...]) -> None:
    code, _, error = call(*words, "--dtype", "float32", typed="import os\n")
    assert code == 0 and "slowly" not in error


@pytest.mark.usefixtures("slow_dtype")
def test_doctor_names_the_slow_dtype(call: Any) -> None:
    assert "torch multiplies bfloat16 slowly here: pack the weights, or use" in call("doctor")[1]
    assert json.loads(call("doctor", "--json")[1])["slow_dtypes"] == ["bfloat16"]
