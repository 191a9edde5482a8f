"""Test what commands say of codecs, scores and stores that packages add."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvant
from foreign import ENTRIES, uninstall_packages
from test_extensions import fill

Install = Callable[..., str]


def test_formats_lists_packages_without_importing_them(install: Install, call: Any) -> None:
    module = install(ENTRIES | {"codecs:raw": "Steps", "codecs:A": "Steps"})
    code, out, _ = call("formats")
    assert code == 0 and module not in sys.modules
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "codec steps kvant-steps 1.2" in lines and "store pile kvant-steps 1.2" in lines
    assert "codec raw kvant-steps 1.2 kvant has a codec of this name" in lines
    assert any(line.startswith("codec A kvant-steps 1.2 allowed are names") for line in lines)
    code, out, _ = call("formats", "steps/affine4,window=100")
    assert code == 0 and "a codec of kvant-steps 1.2: Steps of each row." in out
    code, out, _ = call("plan", "--kv-cache", "steps", "--context", "4096")
    assert code == 0 and "steps" in out


def test_a_package_that_fails_is_one_line(install: Install, call: Any) -> None:
    install(source="import nowhere_at_all", name="kvant-broken")
    for words in ("--kv-cache steps", "--kv-cache raw,prune=keys:25%", "--store pile://a"):
        code, _, error = call("run", "--prompt", "a", *words.split())
        assert code == 2 and "of the package kvant-broken 1.2 cannot be used" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words", ["--kv-cache raw,prune=keys:50%", "--kv-cache steps --store pile://a"]
)
def test_a_package_is_used_by_commands(words: str, install: Install, call: Any) -> None:
    install()
    code, out, error = call("run", "--prompt", "import os\n" * 40, "--no-guard", *words.split())
    assert (code, error) == (0, "") and out


def test_inspect_names_the_package_of_a_file(install: Install, call: Any, tmp_path: Path) -> None:
    install()
    path = tmp_path / "cache.kv"
    kvant.save(fill(kvant.Cache(2, "steps")), path)
    assert "codec steps (kvant-steps 1.2)" in call("inspect", str(path))[1]
    uninstall_packages(tmp_path)
    for words in (("inspect", str(path)), ("run", "--load", str(path))):
        code, _, error = call(*words)
        assert code == 2 and error.count("\n") == 1
        assert f"{path} uses the codec 'steps' of the package kvant-steps 1.2: pip ins" in error


def test_store_lists_the_package_of_a_namespace(
    install: Install, call: Any, tmp_path: Path
) -> None:
    install()
    words = "run", "--prompt", "import os\n" * 60, "--no-guard", "--max-new-tokens", "2"
    assert call(*words, "--kv-cache", "affine8", "--store", str(tmp_path / "a"))[0] == 0
    assert "extensions" not in call("store", "ls", str(tmp_path / "a"))[1]
    assert call(*words, "--kv-cache", "steps", "--store", str(tmp_path / "a"))[0] == 0
    code, out, _ = call("store", "ls", str(tmp_path / "a"))
    assert code == 0 and "codec steps (kvant-steps 1.2)" in out
