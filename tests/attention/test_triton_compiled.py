"""What the kernels are when they are compiled, as far as that can be told without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attention.kernels import needed

pytestmark = [needed, pytest.mark.xdist_group("compiled")]  # by one process, once
SHARED = 227 << 10  # bytes that a program may take on a Hopper GPU


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    script = Path(__file__).with_name("compile_kernels.py")
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_attention_runs_on_tensor_cores_and_loads_16_bytes_at_a_time(
    compiled: dict[str, dict[str, int]],
) -> None:
    kernels = {
        name: facts
        for name, facts in compiled.items()
        if name.startswith("attend") and not any(word in name for word in ("tables", "small"))
    }
    assert len(kernels) == 7  # two of them of steps, and one of pages that were chosen
    for name, facts in kernels.items():
        assert facts["tensor cores"] and facts["16 bytes"], name
        assert facts["shared"] <= SHARED, name


def test_rows_are_put_with_a_kernel_that_loads_16_bytes_at_a_time(
    compiled: dict[str, dict[str, int]],
) -> None:
    kernels = {name: facts for name, facts in compiled.items() if name.startswith("put ")}
    assert len(kernels) == 4
    for name, facts in kernels.items():
        assert facts["16 bytes"], name


def test_a_step_puts_its_rows_with_a_kernel(compiled: dict[str, dict[str, int]]) -> None:
    kernels = [facts["kernel"] for name, facts in compiled.items() if name.startswith("put_token")]
    assert len(kernels) == 2


def test_programs_fit_a_gpu_of_little_shared_memory(compiled: dict[str, dict[str, int]]) -> None:
    kernels = {name: facts for name, facts in compiled.items() if "attend small" in name}
    assert len(kernels) == 2
    for name, facts in kernels.items():
        assert facts["shared"] <= 99 << 10, name


def test_no_kernel_is_compiled_anew_when_a_page_falls_due(
    compiled: dict[str, dict[str, int]],
) -> None:
    kernels = [facts["kernel"] for name, facts in compiled.items() if "attend tables" in name]
    assert len(kernels) == 3
    assert len(set(kernels)) == 1


def test_turning_rounds_every_product(compiled: dict[str, dict[str, int]]) -> None:
    kernels = {name: facts for name, facts in compiled.items() if name.startswith("rotate")}
    assert len(kernels) == 2
    for name, facts in kernels.items():
        assert facts["products"] and not facts["fused"], name


def test_sealing_rounds_as_the_codecs_do(compiled: dict[str, dict[str, int]]) -> None:
    kernels = {name: facts for name, facts in compiled.items() if name.startswith("seal")}
    assert len(kernels) == 4
    for name, facts in kernels.items():
        assert facts["division"], name
        assert not facts["fused"] and not facts["approximate"], name
