"""Record the native library's requests while tests run, as a plugin of pytest.

    PYTHONPATH=tests python -m pytest -p native.recorder --record FILE tests/frames/test_native.py

Attention is recorded with the reference backend's outputs in float64 over the same codes. The other
functions are recorded with the library's own outputs, which the tests compare with those of torch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant import native
from kvant.attention.native import NativeBackend
from kvant.attention.reference import ReferenceBackend
from kvant.contracts import AttentionRequest, View
from native.interface import ENTRIES
from native.recording import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    LOG_SUM_EXP,
    SAME_BFLOAT16,
    SAME_BYTES,
    SAME_FLOAT16,
    SAME_FLOAT32,
    Check,
    Recording,
    RequestMemory,
)

SMALL_BYTES = 1 << 16  # requests are compared with those of the same test up to here, else with all
MAX_REQUEST_BYTES = 32 << 20  # of all memory
MAX_NEW_BYTES = 1 << 18  # of memory that no request before had
MAX_NEW_ATTEND_BYTES = 1 << 19
MIN_OUTPUTS = 16  # of a product: the norm of fewer may be tiny, and one rounding exceeds the bound
MAX_FILE_BYTES = 150 << 20
OUTPUTS = {  # other functions than attend
    "store": [
        f"side[{side}].stored.{field}.data"
        for side in (0, 1)
        for field in ("open", "codes", "scale", "bias")
    ],
    "rotate": ["out"],
    "norm": ["out"],
    "choose": ["chosen"],
    "multiply": ["out"],
    "map": ["out.data"],
}
SAME_FLOATS = (SAME_FLOAT32, SAME_BFLOAT16, SAME_FLOAT16)  # by kvant_dtype
FLOAT_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
# Bounds of attention's error relative to the norm of the output: by the form of the codes, by the
# dtype of rows, and by the dtype of outputs.
FORM_BOUNDS = {"raw": 1e-5, "float": 1e-5, "affine": 3e-3, "codebook": 8e-3}
ROW_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 1e-5}
PRODUCT_BOUND = 4e-4  # of products with codes: rows have 15 bits
OUT_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 1e-3}
Pending = tuple[RequestMemory, list[bytes]]


class Recorder:
    """Selects requests, and adds them to a recording."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.left_out = Counter[str]()
        self.test = ""
        self._seen = set[tuple[Any, ...]]()
        self._pending: Pending | None = None  # attention without expected outputs yet

    def wrap_library(self, library: native.NativeLibrary) -> native.NativeLibrary:
        """Make the functions of a library pass through the recorder."""
        if library.functions is not None:
            for entry in ENTRIES:
                name = f"kvant_{entry}"
                function = self._wrap_function(entry, getattr(library.functions, name))
                setattr(library.functions, name, function)
        return library

    def _wrap_function(self, entry: str, function: Any) -> Callable[[bytes], bytes | None]:
        def call(packed: bytes) -> bytes | None:
            memory = RequestMemory(entry, packed)
            contents = memory.read_blocks() if self._is_selected(memory) else None
            refusal: bytes | None = function(packed)
            if contents is None or refusal is not None:
                return refusal
            if entry == "attend":
                self._pending = memory, contents
            else:
                self._add(memory, contents, _list_written_blocks(memory))
            return None

        return call

    def attend_and_record(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """Return a method for NativeBackend.attend that records the reference's outputs, too."""
        native_attend = NativeBackend.attend

        def attend(
            backend: NativeBackend, request: AttentionRequest, view: View
        ) -> tuple[Tensor, Tensor | None]:
            self._pending = None
            out, lse = native_attend(backend, request, view)
            if self._pending is not None:
                memory, contents = self._pending
                exact = request._replace(q=request.q.double(), return_lse=True)
                right, right_lse = ReferenceBackend().attend(exact, view)
                assert right_lse is not None
                bound = _get_bound(view, out.dtype)
                checks = [_make_check(memory, "out", FLOAT_KINDS[out.dtype], right, bound)]
                if lse is not None:
                    sums = right_lse[..., None]
                    checks.append(_make_check(memory, "lse", LOG_SUM_EXP, sums, bound))
                self._add(memory, contents, checks)
            return out, lse

        return attend

    def _is_selected(self, memory: RequestMemory) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False
        nbytes = sum(block.nbytes for block in memory.blocks)
        test = self.test if nbytes <= SMALL_BYTES else ""
        numbers = test, memory.entry, *memory.list_numbers()
        if numbers in self._seen:
            self.left_out["of the same numbers as others"] += 1
        elif memory.entry == "multiply" and memory.fields["weight.outs"].value < MIN_OUTPUTS:
            self.left_out["of few outputs"] += 1
        elif nbytes > MAX_REQUEST_BYTES:
            self.left_out["large"] += 1
        elif self.recording.nbytes > MAX_FILE_BYTES:
            self.left_out["after the limit of the file"] += 1
        else:
            self._seen.add(numbers)
            return True
        return False

    def _add(self, memory: RequestMemory, contents: list[bytes], checks: list[Check]) -> None:
        limit = MAX_NEW_ATTEND_BYTES if memory.entry == "attend" else MAX_NEW_BYTES
        if not self.recording.add(self.test, memory, contents, checks, limit):
            self.left_out["large"] += 1


RECORDER = Recorder()


def _list_written_blocks(memory: RequestMemory) -> list[Check]:
    """Return checks of the outputs that the library just wrote."""
    paths = [path for path in OUTPUTS[memory.entry] if path in memory.fields]
    addresses = [memory.fields[path].value for path in paths]
    blocks = sorted({memory.locate(address)[0] for address in addresses if address})
    if memory.entry == "multiply":  # summed in an order of the instruction set
        (block,) = blocks
        dtype = (torch.float32, torch.bfloat16, torch.float16)[memory.request.dtype]
        out = torch.frombuffer(bytearray(memory.blocks[block].read()), dtype=dtype)
        rows = out.double().view(-1, memory.fields["weight.outs"].value)
        bound = max(OUT_BOUNDS[dtype], PRODUCT_BOUND)
        return [_make_check(memory, "out", FLOAT_KINDS[dtype], rows, bound)]
    kind = SAME_BYTES
    if memory.entry in ("rotate", "norm", "map"):
        kind = SAME_FLOATS[memory.request.dtype]
    return [Check(kind, block, memory.blocks[block].read()) for block in blocks]


def _get_bound(view: View, out_dtype: torch.dtype) -> float:
    """Return the bound of an output's error."""
    bounds = [OUT_BOUNDS[out_dtype]]
    for side in (view.keys, view.values):
        assert side.codec.form is not None
        bounds += FORM_BOUNDS[side.codec.form.kind], ROW_BOUNDS[side.open.dtype]
    return max(bounds)


def _make_check(
    memory: RequestMemory, path: str, kind: int, expected: Tensor, bound: float
) -> Check:
    block, _ = memory.locate(memory.fields[path].value)
    content = expected.contiguous().numpy().tobytes()
    return Check(kind, block, content, bound, expected.shape[-1])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, required=True, help="file to write requests to")


def pytest_configure() -> None:
    load_library = native.load_library
    native.load_library = lambda path: RECORDER.wrap_library(load_library(path))
    NativeBackend.attend = RECORDER.attend_and_record()  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out repetitions of tests for other instruction sets: their requests are the same."""
    best = native.get_library().isa
    items[:] = [item for item in items if _get_isa(item) in (None, best)]


def _get_isa(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    return params.get("library", params.get("isa"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    RECORDER.test = item.nodeid


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == 0:
        path = session.config.getoption("record")
        path.parent.mkdir(parents=True, exist_ok=True)
        RECORDER.recording.save(path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    recording = RECORDER.recording
    terminalreporter.write_line(f"recorded {recording.count} requests, {recording.nbytes:,} bytes")
    for reason, count in RECORDER.left_out.items():
        terminalreporter.write_line(f"left out {count} requests: {reason}")
