"""Every public name has a docstring, and in it an example that runs."""

from __future__ import annotations

import copy
import doctest
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from kvant import checkpoints

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NEEDS = {"Grammar": "llguidance", "GrammarError": "llguidance"}  # the extra `grammar`


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return checkpoints.load(None, device="cpu", dtype="float32")


@pytest.fixture
def names(loaded: tuple[Any, Any]) -> dict[str, Any]:
    """What examples take for granted."""
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    inputs = tokenizer("import ", return_tensors="pt")
    given = {"model": model, "tokenizer": tokenizer, "inputs": inputs}
    return {"kvant": kvant, "torch": torch, **given}


def described(name: str) -> str:
    """The docstring of a public name, without what Python makes up where a dataclass has none."""
    text = getattr(kvant, name).__doc__ or ""
    return "" if text.startswith(f"{name}(") else text


@pytest.mark.parametrize("name", kvant.__all__)
def test_its_example_runs(
    name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(described(name), names, name, None, 0)
    assert example.examples, f"kvant.{name} shows no example"
    said: list[str] = []
    failed = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append).failed
    assert not failed, "".join(said)


def test_no_public_callable_lacks_a_docstring() -> None:
    ours = [name for name in dir(kvant) if not name.startswith("_")]
    ours = [name for name in ours if callable(getattr(kvant, name))]
    ours = [name for name in ours if getattr(kvant, name).__module__.startswith("kvant")]
    assert set(ours) >= set(kvant.__all__) - {"functional"}
    assert not [name for name in ours if not described(name)]
