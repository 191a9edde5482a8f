"""What the documents show is run, in order, as one session a document."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from kvant.cli.main import main

DOCS = Path(__file__).resolve().parent.parent / "docs"


def called(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code, shlex.join(words)


@pytest.mark.parametrize(
    "name", ["engine", "long-contexts", "prefixes", "sequences", "transformers"]
)
def test_its_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = DOCS / f"{name}.md"
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)


@pytest.mark.parametrize("name", ["coming-from"])
def test_its_tables_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, and what stands in backticks in the second column: Python, or our command."""
    monkeypatch.chdir(tmp_path)
    path = DOCS / f"{name}.md"
    names: dict[str, object] = {}
    found = re.findall(r"^```python\n(.*?)^```|^\|.*?\|(.*?)\|", path.read_text(), re.DOTALL | re.M)
    assert found
    for block, cell in found:
        for code in [block] if block else re.findall(r"`(.*?)`", cell):
            if code.startswith("kvant "):
                called(shlex.split(code), monkeypatch)
            else:
                exec(compile(code, f"{path}: {code}", "exec"), names)
