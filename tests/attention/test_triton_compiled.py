"""Test properties of the compiled kernels that can be checked without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attention.kernels import needed

pytestmark = [needed, pytest.mark.xdist_group("compiled_kernels")]  # in one process, once
SHARED = 227 << 10  # shared memory limit of a program on a Hopper GPU


@pytest.fixture(scope="module")
def compiled_kernels() -> dict[str, dict[str, int]]:
    script = Path(__file__).with_name("compile_kernels.py")
    env = os.environ | {"TRITON_INTERPRET": "0"}
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    kernels: dict[str, dict[str, int]] = json.loads(process.stdout.splitlines()[-1])
    return kernels


def test_attention_uses_tensor_cores_and_16_byte_loads(
    compiled_kernels: dict[str, dict[str, int]],
) -> None:
    kernels = {
        name: facts
        for name, facts in compiled_kernels.items()
        if name.startswith("attend") and not any(word in name for word in ("tables", "small"))
    }
    assert len(kernels) == 7  # two are decode steps, one reads selected pages
    for name, facts in kernels.items():
        assert facts["tensor cores"] and facts["16 bytes"], name
        assert facts["shared"] <= SHARED, name


def test_rows_are_stored_with_16_byte_loads(
    compiled_kernels: dict[str, dict[str, int]],
) -> None:
    kernels = {name: facts for name, facts in compiled_kernels.items() if name.startswith("put ")}
    assert len(kernels) == 4
    for name, facts in kernels.items():
        assert facts["16 bytes"], name


def test_step_stores_its_rows_with_a_kernel(compiled_kernels: dict[str, dict[str, int]]) -> None:
    kernels = [
        facts["kernel"] for name, facts in compiled_kernels.items() if name.startswith("put_token")
    ]
    assert len(kernels) == 2


def test_programs_fit_gpus_with_little_shared_memory(
    compiled_kernels: dict[str, dict[str, int]],
) -> None:
    kernels = {name: facts for name, facts in compiled_kernels.items() if "attend small" in name}
    assert len(kernels) == 2
    for name, facts in kernels.items():
        assert facts["shared"] <= 99 << 10, name


def test_sealing_a_page_compiles_no_new_kernel(
    compiled_kernels: dict[str, dict[str, int]],
) -> None:
    kernels = [
        facts["kernel"] for name, facts in compiled_kernels.items() if "attend tables" in name
    ]
    assert len(kernels) == 3
    assert len(set(kernels)) == 1


def test_rotation_rounds_every_product(compiled_kernels: dict[str, dict[str, int]]) -> None:
    kernels = {name: facts for name, facts in compiled_kernels.items() if name.startswith("rotate")}
    assert len(kernels) == 2
    for name, facts in kernels.items():
        assert facts["products"] and not facts["fused"], name


def test_sealing_rounds_like_the_codecs(compiled_kernels: dict[str, dict[str, int]]) -> None:
    kernels = {name: facts for name, facts in compiled_kernels.items() if name.startswith("seal")}
    assert len(kernels) == 4
    for name, facts in kernels.items():
        assert facts["division"], name
        assert not facts["fused"] and not facts["approximate"], name
