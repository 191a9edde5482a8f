"""Test the laws of attention for Triton kernels: on a GPU, or in its slow interpreter.

So there are fewer cases than elsewhere. `make laws` covers every format as keys and as values, each
combined with another one, with every retention, padding and dtype. By default every format has a
case of one law.
"""

from __future__ import annotations

import pytest
import torch

from attention.kernels import DEVICE, NAME, needed
from laws import cases, test_layers, test_what_a_query_sees
from laws.cases import Case

F32 = torch.float32
CASES = {  # with the law that a case tests by default
    Case(*case): law
    for law, *case in (
        ("", "raw", "affine8", "sinks=3", "step=256,tail=0", 1, F32),
        ("rule", "affine8", "affine4,rotate", "", "step=1,tail=9", "padded", torch.float16),
        ("read", "affine4,rotate", "turbo4", "window=70,sinks=4", "step=256,tail=0", 1, F32),
        ("rule", "turbo4", "turbo3", "", "start=90,tail=3", 1, torch.bfloat16),
        ("", "turbo3", "raw", "window=200,sinks=0", "capacity=640,tail=9", "padded", F32),
        ("rule", "turbo2", "affine4", "window=40,sinks=2", "slack=0,tail=20", 1, F32),
        ("", "affine4", "turbo2", "", "page=128,tail=20,slack=0", 1, F32),
        ("", "raw", "raw", "window=70,sinks=4", "step=1", "padded", F32),
    )
}
CHUNKS = (63, 1, 7, 1, 60, 1, 29)  # a single token that completes a page, and a chunk that does
FEW = (63, 1, 7)

pytestmark = [
    needed,
    pytest.mark.usefixtures("gpu_page_layout"),
    # the interpreter warns of NaN and infinity
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Place rows on the kernels' device and disable other backends."""
    monkeypatch.setattr(cases, "DEVICE", DEVICE)
    for laws in (test_layers, test_what_a_query_sees):
        monkeypatch.setattr(laws, "list_readers", lambda view: [NAME])


@pytest.mark.parametrize(
    ("case", "chunks"),
    [
        *((case, FEW) for case, law in CASES.items() if law == "rule"),
        *(pytest.param(case, CHUNKS, marks=pytest.mark.laws) for case in CASES),
    ],
    ids=str,
)
def test_every_query_sees_the_rows_of_the_rule(case: Case, chunks: tuple[int, ...]) -> None:
    prefill = "dense" if case.dtype == torch.float32 else "stored"
    test_what_a_query_sees.every_query_sees_what_the_rule_says(case, prefill, chunks)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if law == "read" else pytest.mark.laws)
        for case, law in CASES.items()
    ],
    ids=str,
)
def test_attention_covers_the_rows_that_read_returns(case: Case) -> None:
    test_layers.attention_is_over_read_rows(case)
