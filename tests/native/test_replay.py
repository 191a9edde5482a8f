"""Test the replay of recorded requests: it passes here, and fails on a wrong output."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from isas import list_available_isas, load_copy
from kvant import Cache, attend
from kvant.attention.native import NativeBackend
from kvant.native import get_library, map_elements, norm_rows, rotate_rows
from kvant.weights.packed_matrix import DenseMatrix, multiply
from native.interface import ENTRIES
from native.recorder import Recorder
from native.recording import SAME_BYTES, SAME_FLOAT16, Check, Recording, RequestMemory

COMPILER = os.environ.get("CXX") or shutil.which("c++")
pytestmark = [
    pytest.mark.skipif(get_library().functions is None, reason="the native library is not here"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


class Entry(NamedTuple):
    """The arguments of Recording.add, with checks to change."""

    name: str
    memory: RequestMemory
    contents: list[bytes]
    checks: list[Check]


class Entries(Recording):
    """A recording that also keeps its requests in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def add(self, name, memory, contents, checks, max_nbytes):  # type: ignore[no-untyped-def]
        self.entries.append(Entry(name, memory, contents, checks))
        return super().add(name, memory, contents, checks, max_nbytes)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("replay") / "replay"
    source = Path(__file__).parent / "replay.cpp"
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c++17", "-O1", source, "-o", program, "-ldl"], check=True)
    return program


def call_every_function() -> None:
    rows = torch.randn(2, 2, 700, 64)
    cache = Cache(1, "affine8,select=2:0,tail=0")
    cache[0].append(rows, rows.flip(1), prefill="stored")
    view = cache[0].append(*torch.randn(2, 2, 2, 1, 64))
    attend(torch.randn(2, 4, 1, 64), view, backend="native")
    attend(torch.randn(2, 4, 1, 64), view, backend="native", return_lse=True)
    rotate_rows(rows[:, :, :5], (ctypes.c_float * 64)(*[0.125] * 64), signs_last=True)
    x = torch.randn(3, 64).bfloat16()
    norm_rows(x, torch.randn(64).bfloat16(), 1e-5)
    multiply(x, DenseMatrix(torch.randn(64, 64).bfloat16()), torch.randn(64).bfloat16())
    map_elements("add", torch.empty_like(x), x, x.flip(0))
    x[0] = torch.nan
    map_elements("negate", torch.empty_like(x), x)


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    """At least one request of each function."""
    recorder = Recorder()
    recorder.recording = recording = Entries()
    library = recorder.wrap_library(
        load_copy(get_library().isa, tmp_path_factory.mktemp("recorded"))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvant.native.get_library", lambda: library)
        patch.setattr(NativeBackend, "attend", recorder.attend_and_record())
        call_every_function()
    assert {entry.memory.entry for entry in recording.entries} == ENTRIES.keys()
    return recording.entries


def replay(runner: Path, entries: list[Entry], path: Path, isa: str) -> subprocess.CompletedProcess:
    recording = Recording()
    for entry in entries:
        assert recording.add(*entry, max_nbytes=1 << 24)
    recording.save(path)
    functions = get_library().functions
    assert functions is not None
    command = [runner, functions._name, path]
    env = os.environ | {"KVANT_ISA": isa}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_replay_passes_on_every_instruction_set(
    runner: Path, entries: list[Entry], tmp_path: Path
) -> None:
    for isa in list_available_isas():
        process = replay(runner, entries, tmp_path / "file", isa)
        assert process.returncode == 0, process.stderr
        lines = process.stdout.splitlines()
        assert lines[0] == isa
        assert [line.split()[0] for line in lines[1:]] == list(ENTRIES)
    process = replay(runner, entries, tmp_path / "file", "of another age")
    assert process.returncode == 3 and not process.stdout


def change(check: Check) -> Check:
    """Return other expected content: one bit, or one value by 1e-1 of the norm."""
    content = bytearray(check.content)
    if check.kind <= SAME_FLOAT16:
        content[len(content) // 2] ^= 1
    else:
        values = torch.frombuffer(content, dtype=torch.float64)
        values[-1] += 0.1 * float(values.norm())
    return check._replace(content=bytes(content))


@pytest.mark.parametrize("function", ENTRIES)
def test_replay_fails_on_another_output(
    runner: Path, entries: list[Entry], tmp_path: Path, function: str
) -> None:
    chosen = [entry for entry in entries if entry.memory.entry == function]
    for entry in chosen:
        for i, check in enumerate(entry.checks):
            checks = [*entry.checks]
            checks[i] = change(check)
            wrong = entry._replace(checks=checks)
            process = replay(runner, [wrong], tmp_path / "file", get_library().isa)
            assert process.returncode == 1 and function in process.stderr
            assert "0 of     1 requests passed" in process.stdout


def test_replay_fails_on_a_changed_input(
    runner: Path, entries: list[Entry], tmp_path: Path
) -> None:
    """A block without a check must not change."""
    wrong = entries[0]._replace(checks=[])
    process = replay(runner, [wrong], tmp_path / "file", get_library().isa)
    assert process.returncode == 1 and "is overwritten" in process.stderr


def test_replay_fails_on_a_refusal(runner: Path, entries: list[Entry], tmp_path: Path) -> None:
    entry = next(entry for entry in entries if entry.memory.entry == "norm")
    contents = [bytes(len(entry.contents[0])), *entry.contents[1:]]
    contents[0] = entry.contents[0][:32] + (9).to_bytes(8, "little") + entry.contents[0][40:]
    process = replay(
        runner, [entry._replace(contents=contents)], tmp_path / "file", get_library().isa
    )
    assert process.returncode == 1 and "refused: " in process.stderr


def test_only_nan_may_have_other_bits(runner: Path, entries: list[Entry], tmp_path: Path) -> None:
    entry = next(e for e in reversed(entries) if e.memory.entry == "map")
    (check,) = entry.checks
    other = check._replace(content=b"\xc1\xff" * 64 + check.content[128:])
    for kind, status in ((check.kind, 0), (SAME_BYTES, 1)):
        changed = entry._replace(checks=[other._replace(kind=kind)])
        process = replay(runner, [changed], tmp_path / "file", get_library().isa)
        assert process.returncode == status


def test_cut_file_is_an_error(runner: Path, entries: list[Entry], tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert replay(runner, entries, path, "").returncode == 0
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    functions = get_library().functions
    assert functions is not None
    assert subprocess.run([runner, functions._name, path], capture_output=True).returncode == 2
