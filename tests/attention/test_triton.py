"""Test the triton backend against the reference: formats, rules, shapes and refusals."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attention.kernels import DEVICE, GPU, NAME, needed
from kvant import Cache, CacheSpec, Mask, UnsupportedView, attend, parse
from kvant.attention import store_rows, triton
from kvant.attention.triton import TritonBackend, kernel_launch, store_pages
from kvant.attention.triton import token_operators as operators
from kvant.attention.triton.arguments import StaticTritonPageTable, TritonPageTable
from kvant.attention.triton.kernel_launch import KernelView, LaunchPlan
from kvant.cache import merge
from kvant.cache.tokens import plan_tokens
from kvant.contracts import AttentionRequest, View
from kvant.replay.steps import TritonDecodeStep
from thin import thin_rows

pytestmark = [
    needed,
    pytest.mark.usefixtures("gpu_page_layout"),
    # the interpreter warns of NaN and infinity
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
FORMATS = ("raw", "affine8", "affine4", "turbo4", "turbo3", "turbo2")
GROUPS = tuple(f"affine{bits},group={group}" for bits in (8, 4) for group in (16, 32, 128))
MAIN = ("raw", "affine4", "turbo3")
MIXED = ("affine8v4", "raw/affine4", "turbo3/raw", "turbo4/affine8", "affine4/turbo2")
# Rows in 32 bits are computed in 32 bits; other rows are decoded to float16.
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 1e-3}


def make_view(
    text: str,
    queries: int,
    *,
    heads: int = 1,
    dims: tuple[int, int] = (32, 48),
    count: int = 150,
    dtype: torch.dtype = torch.float32,
    start: list[int] | None = None,
) -> View:
    """Return a view of the newest queries over random rows, most of them sealed."""
    state: Any = Cache(1, f"{text},tail=3,prefill=stored")[0]
    shape = (1 if start is None else len(start), heads, count)
    keys, values = (torch.randn(*shape, dim, device=DEVICE).to(dtype) for dim in dims)
    before = count - queries
    if before:
        state.append(keys[:, :, :before], values[:, :, :before], start=start)
        start = None
    return state.append(keys[:, :, before:], values[:, :, before:], start=start)


def make_queries(
    view: View, group: int, queries: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    heads, dim = view.keys.open.shape[1::2]
    return torch.randn(view.batch, heads * group, queries, dim, device=DEVICE).to(dtype)


def check_against_reference(q: Tensor, view: View, tolerance: float = 1e-5, **options: Any) -> None:
    """Compare outputs, relative to their size, and log-sum-exp with the reference over the same
    rows.
    """
    ours, lse = attend(q, view, backend=NAME, return_lse=True, **options)
    theirs, other = attend(q.double(), view, backend="reference", return_lse=True, **options)
    assert torch.equal(ours.isnan(), theirs.isnan())
    error = (ours.double() - theirs).nan_to_num(0.0).norm() / theirs.nan_to_num(0.0).norm()
    assert error < tolerance
    assert torch.equal(lse == -math.inf, other == -math.inf)
    off = (lse.double() - other).nan_to_num(0.0, 0.0, 0.0).abs()
    assert off.max() < 2 * tolerance


@pytest.mark.parametrize(
    ("text", "dtype"),
    thin_rows(product([*FORMATS, *GROUPS, *MIXED], NEAR)),
    ids=str,
)
def test_every_format_decodes_like_the_reference(text: str, dtype: torch.dtype) -> None:
    for queries in (1, 5):
        view = make_view(text, queries, heads=2, dtype=dtype)
        check_against_reference(make_queries(view, 2, queries, dtype).float(), view, NEAR[dtype])


@pytest.mark.parametrize("text", ["affine8", "affine4", "turbo4", "turbo3", "turbo2"])
def test_codes_are_read_as_words(text: str) -> None:
    """Codes of 16-bit rows whose widths are powers of two; keys and values differ in order."""
    view = make_view(text, 1, heads=2, dims=(128, 128), dtype=torch.bfloat16)
    q = make_queries(view, 2, 1, torch.bfloat16).float()
    check_against_reference(q, view, NEAR[torch.bfloat16])


@pytest.mark.parametrize(
    ("text", "dims"),
    thin_rows(product(FORMATS, [(16, 16), (64, 128), (80, 96), (48, 112), (256, 192)])),
    ids=str,
)
def test_widths_that_are_not_powers_of_two(text: str, dims: tuple[int, int]) -> None:
    view = make_view(text, 1, dims=dims)
    check_against_reference(make_queries(view, 3, 1), view)


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(n, marks=[] if n in (1, 3, 16, 17) else pytest.mark.laws)
        for n in (*range(1, 18), 71)
    ],
)
def test_query_groups_of_any_size_share_rows(group: int) -> None:
    text = FORMATS[group % len(FORMATS)]
    for queries in (1, 7):
        view = make_view(text, queries, heads=2, dims=(32, 32))
        check_against_reference(make_queries(view, group, queries), view)


@pytest.mark.parametrize(
    ("text", "count"), thin_rows(product(MAIN, [1, 2, 63, 64, 65, 67, 68, 130, 195]))
)
def test_lengths_that_end_anywhere_in_a_page(text: str, count: int) -> None:
    view = make_view(text, 1, count=count, dims=(32, 32))
    check_against_reference(make_queries(view, 2, 1), view)


RULES = ("window=40,sinks=0", "window=70,sinks=5", "sinks=3", "capacity=400", "page=128")
ASKED = {"softcap": 5.0, "scale": 0.2}


@pytest.mark.parametrize(
    ("text", "rule", "queries"), thin_rows(product(["raw", "turbo3/affine4"], RULES, [1, 21]))
)
def test_windows_sinks_padding_and_caps(text: str, rule: str, queries: int) -> None:
    view = make_view(f"{text},{rule}", queries, count=200, start=[3, 100])
    check_against_reference(
        make_queries(view, 4, queries), view, sink_logits=torch.randn(4, device=DEVICE), **ASKED
    )


MASKS = (
    Mask(window=30, sinks=5),
    Mask(window=7),
    Mask(chunk=50),
    Mask(causal=False),
    Mask(causal=False, window=20),
    Mask(window=200, chunk=64),
)


@pytest.mark.parametrize(("mask", "queries"), thin_rows(product(MASKS, [1, 33])), ids=str)
def test_mask_rule_replaces_the_rule_of_the_view(mask: Mask, queries: int) -> None:
    for text in ("raw", "affine4"):
        view = make_view(text, queries, start=[0, 30])
        check_against_reference(make_queries(view, 2, queries), view, mask=mask)


@pytest.mark.parametrize(
    ("text", "dtype"),
    thin_rows(product(["raw", "affine8", "turbo4"], [torch.float32, torch.bfloat16])),
    ids=str,
)
def test_query_magnitudes_of_any_size(text: str, dtype: torch.dtype) -> None:
    """Scores are finite if they are finite after scaling."""
    view = make_view(text, 5, dtype=dtype)
    huge = 3e37 if "turbo" in text else 3e38  # limit that a rotation can hold
    for size, scale in ((huge, 2e-38), (huge, -2e-38), (1e-20, 1e20), (1.0, 0.0), (2.0, 1e-3)):
        q = (torch.rand(1, 4, 5, 32) * size).to(DEVICE, dtype)
        check_against_reference(
            q.float(), view, 8 * NEAR[dtype], scale=scale
        )  # for scores up to 50


@pytest.mark.parametrize("softcap", [1e-3, 0.5, 20.0, 1e3, 1e6, 1e30])
def test_softcaps_of_any_size(softcap: float) -> None:
    view = make_view("raw", 5)
    check_against_reference(make_queries(view, 2, 5), view, softcap=softcap)
    check_against_reference(make_queries(view, 2, 5) * 100, view, softcap=softcap, tolerance=1e-4)


@pytest.mark.parametrize("window", [pytest.param(2**31 - 1, marks=pytest.mark.laws), 2**31, 2**40])
def test_mask_ranges_may_exceed_32_bits(window: int) -> None:
    view = make_view("affine4", 5, start=[0, 30])
    q = make_queries(view, 2, 5)
    for mask in (
        Mask(window=window, sinks=window),
        Mask(chunk=window),
        Mask(window=window, chunk=window),
    ):
        rule = kernel_launch._make_visibility_args(
            AttentionRequest(q, 1.0, mask), KernelView.from_view(view)
        )
        assert max(rule.window, rule.mask_sinks, rule.chunk) < 2**31
        check_against_reference(q, view, mask=mask)


@pytest.mark.parametrize(
    ("text", "rule"),
    thin_rows(
        product(
            ["raw", "affine4/turbo3"], ["", "window=40,sinks=0", "window=70,sinks=5", "sinks=70"]
        )
    ),
)
def test_sequences_of_different_lengths_are_read_together(text: str, rule: str) -> None:
    """One sequence is too short for all queries to be its tokens."""
    spec, caches = ",".join(filter(None, (text, rule, "tail=3"))), []
    for count in (200, 5, 131):
        cache = Cache(1, spec)
        cache[0].append(*torch.randn(2, 1, 1, count, 32, device=DEVICE))
        caches.append(cache)
    state = merge(caches)[0]
    for queries, prefill in ((1, None), (9, "dense"), (30, "stored")):
        view = state.append(*torch.randn(2, 3, 1, queries, 32, device=DEVICE), prefill=prefill)
        check_against_reference(make_queries(view, 1, queries), view)
    check_against_reference(make_queries(view, 2, 3), state.view(3))


def test_output_of_a_sequence_is_independent_of_the_batch() -> None:
    """To the bit, if the same number of programs reads it."""
    caches = [Cache(1, "affine4,tail=3") for _ in range(3)]
    for cache, count in zip(caches, (150, 150, 90), strict=True):
        cache[0].append(*torch.randn(2, 1, 2, count, 32, device=DEVICE))
    pairs = [merge([caches[0], other])[0] for other in caches[1:]]
    row, q = torch.randn(2, 1, 2, 1, 32, device=DEVICE), torch.randn(1, 4, 1, 32, device=DEVICE)
    outs = []
    for pair in pairs:
        view = pair.append(*row.expand(-1, 2, -1, -1, -1))
        outs.append(attend(q.expand(2, -1, -1, -1), view, backend=NAME)[0])
    assert torch.equal(*outs)


def test_hidden_rows_are_never_read() -> None:
    for text in ("raw", "affine4,sinks=3"):
        view = make_view(text, 5, dims=(32, 32), start=[0, 30])
        view = view._replace(page_table=view.page_table.mask_leading_rows([70, 2]))
        check_against_reference(make_queries(view, 2, 5), view)


@pytest.mark.parametrize("page", [8, 48])
def test_open_pages_may_hold_any_number_of_rows(page: int) -> None:
    recipe: Any = parse("raw,window=70,sinks=5", 1).layers[0]
    state: Any = Cache(spec=CacheSpec((replace(recipe, page=page),)))[0]
    for queries in (90, 20, 1):
        view = state.append(*torch.randn(2, 1, 2, queries, 32, device=DEVICE))
        check_against_reference(make_queries(view, 2, queries), view)


def test_prefill_sees_its_own_rows_dense() -> None:
    state: Any = Cache(1, "affine4,tail=0")[0]
    state.append(*torch.randn(2, 1, 1, 100, 32, device=DEVICE))
    view = state.append(*torch.randn(2, 1, 1, 130, 32, device=DEVICE), prefill="dense")
    check_against_reference(make_queries(view, 1, 130), view)


@pytest.mark.parametrize(
    ("text", "side", "odd"),
    thin_rows(
        product(["raw", "affine8", "affine4", "turbo3"], ["keys", "values"], [math.nan, math.inf])
    ),
)
def test_nonfinite_row_reaches_only_queries_that_see_it(text: str, side: str, odd: float) -> None:
    """In a sealed page and after it, inside the padding and outside."""
    for queries in (1, 20):
        state: Any = Cache(1, f"{text},window=20,sinks=0,tail=0,prefill=stored,slack=200")[0]
        rows = dict(zip(("keys", "values"), torch.randn(2, 2, 2, 140, 32), strict=True))
        rows[side][0, 0, 100] = odd
        rows[side][1, 1, 125] = odd
        rows[side][1, 0, 115] = odd
        keys, values = (row.to(DEVICE) for row in rows.values())
        state.append(keys[:, :, :110], values[:, :, :110], start=[0, 116])
        view = state.append(keys[:, :, 110:], values[:, :, 110:])
        q = torch.ones(2, 2, queries, 32, device=DEVICE)
        ours, theirs = (attend(q, view, backend=b).isfinite() for b in (NAME, "reference"))
        assert torch.equal(ours.all(-1), theirs.all(-1))
        assert not theirs.all()


@pytest.mark.parametrize(
    ("text", "side"),
    thin_rows(
        product(["affine8", "affine4", "affine8,rotate", "turbo4", "turbo2"], ["keys", "values"])
    ),
)
def test_values_beyond_float16_stay_finite(text: str, side: str) -> None:
    """bfloat16 rows can be this large, and their codes may decode to larger values."""
    for queries in (1, 5):
        state: Any = Cache(1, f"{text},tail=3,prefill=stored")[0]
        rows = dict(zip(("keys", "values"), torch.randn(2, 1, 2, 150, 32).bfloat16(), strict=True))
        rows[side][:, 0, 20, 7] = 1e5
        rows[side][:, 1, 21] = 1e5
        keys, values = (row.to(DEVICE) for row in rows.values())
        state.append(keys[:, :, :-queries], values[:, :, :-queries])
        view = state.append(keys[:, :, -queries:], values[:, :, -queries:])
        q = make_queries(view, 2, queries).float()
        ours, theirs = (attend(q, view, backend=b) for b in (NAME, "reference"))
        assert ((ours - theirs).norm() / theirs.norm()) < 2e-3


@pytest.mark.parametrize("text", ["raw", "affine8", "turbo4"])
def test_nan_query_gives_nan(text: str) -> None:
    for dtype in NEAR:
        view = make_view(text, 3, dtype=dtype)
        q = make_queries(view, 2, 3, dtype)
        q[0, 1, 0, 3] = math.nan
        ours, theirs = (attend(q, view, backend=b).isnan() for b in (NAME, "reference"))
        assert torch.equal(ours, theirs)


def test_strides_of_the_tensors_are_used() -> None:
    view = make_view("affine4", 5, dtype=torch.float16, start=[0, 9])
    q = make_queries(view, 2, 5, torch.float16).transpose(1, 2).contiguous().transpose(1, 2)
    check_against_reference(q, view, NEAR[torch.float16])


def test_codec_fields_are_found_by_name() -> None:
    view = make_view("affine8/turbo4", 1, dims=(32, 32))
    keys, values = (
        replace(side, sealed=dict(reversed(list(side.sealed.items()))))
        for side in (view.keys, view.values)
    )
    other = view._replace(keys=keys, values=values)
    q, place = make_queries(view, 2, 1), TritonPageTable.from_page_table(view.page_table, DEVICE)
    assert torch.equal(attend(q, view, backend=NAME), attend(q, other, backend=NAME))
    request = AttentionRequest(q, 1.0, view.mask)
    ours, theirs = (operators.attend_token(v, place, request) for v in (view, other))
    assert torch.equal(ours, theirs)


def test_many_queries_need_no_more_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view("turbo2", 20, dims=(32, 32))
    q = make_queries(view, 2, 20)
    whole = attend(q, view, backend=NAME)
    monkeypatch.setattr(kernel_launch, "MAX_PARTIAL_VALUES", 7 * 2 * 4 * 32)
    assert (attend(q, view, backend=NAME) - whole).abs().max() < 1e-6


@pytest.mark.parametrize("rows", list(NEAR), ids=str)
def test_outputs_have_the_dtype_of_the_queries(rows: torch.dtype) -> None:
    for text in ("raw", "affine8"):
        view = make_view(text, 1, dtype=rows)
        for dtype in NEAR:
            q = make_queries(view, 2, 1, dtype)
            out = attend(q, view, backend=NAME)
            assert out.dtype == dtype
            expected = attend(q.double(), view, backend="reference")
            # The interpreter truncates bfloat16 instead of rounding.
            assert ((out - expected).norm() / expected.norm()) < max(NEAR[rows], 2 * NEAR[dtype])


@pytest.mark.parametrize("queries", [1, 5])
def test_sink_logits_may_have_any_strides(queries: int) -> None:
    view = make_view("raw", queries, heads=2)
    q = make_queries(view, 2, queries)
    for logits in (torch.tensor(3.0).expand(4), torch.arange(8.0)[::2], torch.ones(4, 2)[:, 1]):
        check_against_reference(q, view, sink_logits=logits.to(DEVICE))


def test_kernels_launch_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every device, not only the first one; on a CPU there is no choice."""
    devices: list[torch.device] = []

    def run_on_device(device: torch.device) -> Any:
        devices.append(device)
        return nullcontext()

    guard = kernel_launch.use_device(torch.device("cuda:1"))
    assert isinstance(guard, torch.cuda.device) and guard.idx == 1
    assert isinstance(kernel_launch.use_device(torch.device("cpu")), nullcontext)
    for module in (kernel_launch, operators, store_pages):
        monkeypatch.setattr(module, "use_device", run_on_device)
    cache = Cache(1, "affine4,tail=0,prefill=stored")
    view = cache[0].append(*torch.randn(2, 1, 2, 69, 32, device=DEVICE))
    attend(make_queries(view, 2, 1), view, backend=NAME)
    step = make_step(cache)
    step(make_queries(view, 2, 1), *torch.randn(2, 1, 2, 1, 32, device=DEVICE))
    assert devices == [view.keys.open.device] * (4 if GPU else 3)


def make_step(cache: Cache) -> TritonDecodeStep:
    changes = plan_tokens(cache)
    return TritonDecodeStep.from_view(
        cache[0].make_view(changes[0]), StaticTritonPageTable(changes[0], DEVICE)
    )


def test_grids_stay_within_gpu_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 70,000 heads in all: every axis but the first is limited to 65,535."""
    grids: dict[str, list[int]] = {}

    class Spied:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids[self.name] = list(grid)
            return lambda *args, **options: None

    cache = Cache(1, "affine8,tail=0,prefill=stored")
    view = cache[0].append(*torch.randn(2, 7000, 10, 64, 16, device=DEVICE))
    rows = torch.randn(7000, 10, 1, 16, device=DEVICE)
    for module, kernel in (("attend", "attend"), ("attend", "merge"), ("store", "seal")):
        spy = import_module(f"kvant.attention.triton.kernels.{module}")
        monkeypatch.setattr(spy, kernel, Spied(kernel))
    for kernel in ("put", "put_token"):
        monkeypatch.setattr("kvant.attention.triton.kernels.store." + kernel, Spied(kernel))
    kernel_launch.launch_attention(
        AttentionRequest(torch.cat([rows, rows], 1), 1.0, view.mask), KernelView.from_view(view)
    )
    operators.write_token(
        view, TritonPageTable.from_page_table(view.page_table, DEVICE), rows, rows
    )
    monkeypatch.setattr(store_rows, "STORE_BACKENDS", [TritonBackend(NAME, DEVICE.type)])
    cache[0].append(*rows.expand(2, -1, -1, 64, -1))
    assert grids.keys() == {"attend", "merge", "put", "put_token", "seal"}
    for first, *others in grids.values():
        assert first >= 70_000 and max(others, default=0) <= 65_535


@pytest.fixture
def another_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("another_default")
@pytest.mark.parametrize("queries", [1, 5])
def test_default_dtype_changes_nothing(queries: int) -> None:
    """Regression: partial sums and log-sum-exp were allocated in the default dtype."""
    view = make_view("affine8", queries, count=700)
    q = make_queries(view, 2, queries).float()
    _, lse = attend(q, view, backend=NAME, return_lse=True)
    assert lse.dtype == torch.float32
    check_against_reference(q, view)


def test_unsupported_views_give_a_reason() -> None:
    reasons = {
        "affine3": "keys of Affine of 3 bits",
        "fp8": "keys of Fp8",
        "affine8/affine6": "values of Affine of 6 bits",
    }
    for text, reason in reasons.items():
        view = make_view(text, 1)
        with pytest.raises(UnsupportedView, match=reason):
            attend(make_queries(view, 1, 1), view, backend=NAME)
    view = make_view("affine8", 1, dims=(40, 40))
    with pytest.raises(UnsupportedView, match="keys 40 wide: a multiple of 16 up to 256"):
        attend(make_queries(view, 1, 1), view, backend=NAME)
    view = make_view("affine8", 1)
    with pytest.raises(UnsupportedView, match="an explicit mask tensor"):
        attend(
            make_queries(view, 1, 1), view, backend=NAME, mask=torch.ones(1, 9, dtype=torch.bool)
        )
    with pytest.raises(UnsupportedView, match="queries with a stride of 2 from channel to channel"):
        attend(torch.randn(1, 2, 1, 64, device=DEVICE)[..., ::2], view, backend=NAME)
    q = FakeTensorMode().from_tensor(make_queries(view, 1, 1))
    with pytest.raises(UnsupportedView, match="queries in a FakeTensor"):
        attend(q, view, backend=NAME)
    with pytest.raises(UnsupportedView, match=r"queries of torch\.float64"):
        attend(make_queries(view, 1, 1).double(), view, backend=NAME)


@pytest.mark.skipif(GPU, reason="the interpreter is for where there is no GPU")
def test_cpu_rows_are_read_only_by_the_interpreter() -> None:
    view = make_view("raw", 1)
    attend(make_queries(view, 1, 1), view)
    assert not view.stats.attend_calls.keys() & {"triton", NAME}
    view.stats.attend_calls.clear()
    with pytest.raises(UnsupportedView, match="'triton' does not read this view: rows on cpu"):
        attend(make_queries(view, 1, 1), view, backend="triton")
    attend(make_queries(view, 1, 1), view, backend=NAME)
    assert view.stats.attend_calls == {NAME: 1}


@pytest.mark.skipif(GPU, reason="the interpreter is for where there is no GPU")
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param("0", "0", marks=pytest.mark.laws), ("0", "1"), ("1", "0")],
)
def test_interpreter_mode_is_fixed_when_triton_is_imported(before: str, after: str) -> None:
    """A later change of the environment would compile half of the kernels, which then fail."""
    script = f"""
import os
import triton.language
os.environ["TRITON_INTERPRET"] = "{after}"
import torch
from kvant import Cache, attend
from kvant.cache import layout
layout.select_tiles = lambda device: None
view = Cache(1, "affine8,tail=0,prefill=stored")[0].append(*torch.randn(2, 1, 2, 99, 32))
attend(torch.randn(1, 2, 1, 32), view, backend="interpreted")
"""
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": before},
    )
    assert "the interpreter is off: set TRITON_INTERPRET=1 before" in process.stderr


def test_tiles_and_stages_fit_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view("raw", 64, dims=(256, 256))
    assert TritonBackend(NAME, DEVICE.type).supports(view) is None
    for room, tile, stages in ((227, 32, 1), (100, 16, 1), (84, 16, 1)):
        monkeypatch.setattr(
            kernel_launch, "get_available_shared_bytes", lambda device, room=room: room << 10
        )
        kernel_view = KernelView.from_view(view)
        plan = LaunchPlan.make(kernel_view, 2, 128)
        assert plan.tile_queries == tile
        assert kernel_launch._limit_num_stages(kernel_view, plan) == stages
    narrow = KernelView.from_view(make_view("raw", 1, dims=(64, 64), dtype=torch.bfloat16))
    sealed, wide = (
        KernelView.from_view(make_view(text, 1, dims=(64, 64), dtype=torch.bfloat16))
        for text in ("affine4", "affine8")
    )
    for room, stages, sealed_stages in ((227, 3, 5), (55, 3, 5), (48, 2, 5), (20, 1, 2)):
        monkeypatch.setattr(
            kernel_launch, "get_available_shared_bytes", lambda device, room=room: room << 10
        )
        expected_stages = stages, sealed_stages, min(sealed_stages, 3)
        for kernel_view, expected in zip((narrow, sealed, wide), expected_stages, strict=True):
            plan = LaunchPlan.make(kernel_view, 2, 1)
            assert kernel_launch._limit_num_stages(kernel_view, plan) == expected
    monkeypatch.setattr(triton, "get_available_shared_bytes", lambda device: 64 << 10)
    reason = "rows need 86016 bytes of shared memory: the device has 65536"
    assert TritonBackend(NAME, DEVICE.type).supports(view) == reason


SELECTED = (
    *(
        "affine8",
        "affine4,sinks=70",
        "turbo4",
        "raw",
        "affine8v4,window=550,sinks=0",
        "affine4,page=128",
    ),
    "turbo3/affine8",
)


@pytest.mark.parametrize(("text", "queries"), thin_rows(itertools.product(SELECTED, [1, 3])))
def test_only_selected_pages_are_read(text: str, queries: int) -> None:
    view = make_view(f"{text},select=2:0", queries, heads=2, count=800, start=[0, 190])
    q = torch.randn(2, 4, queries, 32, device=DEVICE)
    assert (
        TritonBackend(NAME, DEVICE.type).select_pages(AttentionRequest(q, 1.0, view.mask), view)
        is not None
    )
    out = attend(q, view, backend=NAME)
    torch.testing.assert_close(out, attend(q, view, backend="reference"), rtol=1e-5, atol=1e-5)
    every = attend(q, view._replace(selection=None), backend=NAME)
    assert (out - every).abs().max() > 1e-2


@pytest.mark.parametrize("backend", [NAME, "native"])
def test_sinks_of_a_recoded_window_are_read(backend: str) -> None:
    """Regression: after a recode of a window, the kernels read no sinks."""
    rows = torch.randn(2, 1, 1, 601, 32, device=DEVICE)
    rows[:, :, :, :4] *= 30
    cache = Cache(1, "raw,window=128")
    cache[0].append(*rows[..., :600, :])
    cache.recode("raw,window=128")
    view = cache[0].append(*rows[..., 600:, :])
    q = torch.randn(1, 2, 1, 32, device=DEVICE)
    expected, out = attend(q, view, backend="reference"), attend(q, view, backend=backend)
    assert (out - expected).abs().max() < 1e-3


@pytest.mark.parametrize("backend", [NAME, "reference"])
def test_queries_older_than_a_sealed_sink_page_read_its_dense_rows(backend: str) -> None:
    """Regression: rows that share a page with sinks were left out for queries before its seal."""
    rows = torch.randn(2, 1, 1, 90, 64, device=DEVICE)
    cache = Cache(1, "affine8,sinks=4")
    cache[0].append(*rows)
    q = torch.randn(1, 2, 40, 64, device=DEVICE)
    out = attend(q, cache[0].view(40), backend=backend)
    dense = Cache(1, "raw")
    dense[0].append(*rows)
    expected = attend(q, dense[0].view(40), backend="reference")
    assert (out - expected).abs().max() < 0.05
