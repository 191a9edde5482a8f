"""What the README shows is run, and the bytes in its table are what the planner says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvant import Shape, plan

README = Path(__file__).resolve().parent.parent / "README.md"


def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)


def test_its_table_is_the_planners() -> None:
    lines = re.findall(r"^\| (`.*?) \| (\d+) \| ([\d.]+) \|", README.read_text(), re.MULTILINE)
    assert len(lines) == 8
    for formats, nbytes, ratio in lines:
        for spec in re.findall(r"`(\w+)`", formats):
            cost = plan(Shape(1, 8, 128, 128), spec).nbytes_per_token
            assert cost == int(nbytes)
            assert cost / 4096 == pytest.approx(float(ratio), abs=6e-4)
