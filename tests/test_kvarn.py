"""The codecs that tools/kvarn.py measures, and that docs/kvarn.json has all of its rows."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

import kvant
from kvant.codecs.frames import Identity
from kvant.contracts import Codec
from kvarn import RESULTS_FILE, TABLES, NormalizedCodebook, PublishedKvarn, make_spec

PAGE, DIM = 64, 64
CODECS: dict[str, Codec] = {
    "uniform": NormalizedCodebook(4, "uniform", False, Identity()),
    "lloyd": NormalizedCodebook(3, "lloyd", False, Identity()),
    "by channel": PublishedKvarn(4, True, Identity()),
    "by row": PublishedKvarn(2, False, Identity()),
}
CENTERED = NormalizedCodebook(4, "lloyd", True, Identity())


def make_page() -> Tensor:
    return torch.randn(2, 3, PAGE, DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("codec", [*CODECS.values(), CENTERED], ids=[*CODECS, "mean"])
def test_fields_describe_the_output_of_seal(codec: Codec) -> None:
    sealed, fields = codec.seal(make_page()), codec.fields(DIM)
    assert sealed.keys() == fields.keys()
    for name, field in fields.items():
        assert sealed[name].shape == (2, 3, field.height(PAGE), field.width)
        assert sealed[name].dtype == field.dtype


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_scales_of_rows_and_channels_add_no_error(codec: Codec) -> None:
    page = make_page()
    scales = 2.0 ** torch.arange(PAGE).remainder(5)[:, None] * 2.0 ** torch.arange(DIM).remainder(7)
    errors = [
        (codec.open(codec.seal(page * scale)) / scale - page).norm() / page.norm()
        for scale in (torch.ones(()), scales)
    ]
    assert errors[1] < 1.05 * errors[0] < 0.5


def test_bits_include_the_scales_of_channels() -> None:
    spec = make_spec("kvarn lloyd mean 4v2", "tail=0", 1)
    plan = kvant.plan(kvant.Shape(1, 1, DIM, DIM), spec, context=1)
    keys, values = 4 + 3 * 16 / DIM, 2 + 2 * 16 / DIM  # scales of rows and channels; and means
    assert plan.nbytes_per_token == DIM * (keys + values) / 8


def test_file_has_every_row() -> None:
    rows = json.loads(RESULTS_FILE.read_text())["rows"]
    measured = [(row["model"], row["options"], row["format"]) for row in rows]
    listed = [(table.model, table.options, form) for table in TABLES for form in table.formats]
    assert sorted(measured) == sorted(listed)
