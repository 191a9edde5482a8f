"""Test specs as JSON: every spec round-trips, and a corrupt header gives a spec or an error."""

import json
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant.codecs import CODECS, Affine, Codebook, Fp8, Raw
from kvant.codecs.frames import Diagonal, FrameProduct, Identity, Rotation
from kvant.contracts import Frame, PageSelection
from kvant.errors import SpecError
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, RecurrentSpec, SharedSpec
from kvant.retention import KeepAll, Window
from kvant.spec import from_json, parse, to_json


@dataclass(frozen=True)
class Toy:
    """A custom codec, with a field of every type that a header can hold."""

    name: ClassVar[str] = "toy_codec"
    frame: Frame = field(default_factory=Identity)
    level: int | None = None
    factor: float = 0.5
    strict: bool = True
    label: str = "a"
    table: tuple[tuple[float, ...], ...] = ((1.0, 2.0), (0.1,))
    exact: ClassVar[bool] = False
    tail: ClassVar[int] = 0


@pytest.fixture
def toy_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "toy_codec", Toy)


@pytest.mark.usefixtures("toy_codec")
def test_custom_codec_round_trips() -> None:
    spec = CacheSpec((LayerSpec(Toy(Rotation(3), 7, 1.5, False, "b", ()), Toy(), KeepAll()),))
    assert from_json(to_json(spec)) == spec


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LayerSpec(Toy(), Toy(), KeepAll()), "Toy has no name"),
        (
            LayerSpec(Raw(), Raw(), KeepAll(), dtype=torch.int8),
            "dtype is torch.int8; allowed: float32",
        ),
    ],
)
def test_values_a_header_cannot_hold_are_not_written(layer: LayerSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        to_json(CacheSpec((layer,)))


numbers = st.integers(1, 2**31 - 1)
scales = st.floats(0.01, 100.0)
simple_frames = st.one_of(
    st.just(Identity()),
    st.builds(Rotation, st.integers(0, 2**64 - 1)),
    st.builds(Diagonal, st.tuples(st.tuples(scales, scales), st.tuples(scales, scales))),
)
frames = simple_frames | st.builds(FrameProduct, st.lists(simple_frames, max_size=3).map(tuple))
codecs = st.one_of(
    st.just(Raw()),
    st.builds(
        Affine,
        st.sampled_from([2, 3, 4, 5, 6, 8]),
        st.sampled_from([16, 128]),
        frames,
        st.booleans(),
    ),
    st.builds(Codebook, st.sampled_from([2, 3, 4]), st.booleans(), frames),
    st.builds(Fp8, frames),
)
attention = st.builds(
    LayerSpec,
    codecs,
    codecs,
    st.builds(KeepAll, numbers) | st.builds(Window, numbers, numbers),
    page=numbers,
    tail=st.none() | numbers,
    slack=numbers,
    dense_until=numbers,
    prefill=st.sampled_from(["dense", "stored"]),
    step=st.integers(1, 1 << 16),
    capacity=st.none() | numbers,
    dtype=st.sampled_from(
        [
            None,
            torch.float16,
            torch.bfloat16,
            torch.float32,
        ]
    ),
    chunk=st.none() | numbers,
    value_dim=st.none() | numbers,
    select=st.none() | st.builds(PageSelection, numbers, st.floats(0, 100)),
)
recurrent = st.builds(RecurrentSpec, numbers)
groups = st.builds(
    GroupSpec, st.tuples(st.tuples(st.just("a"), attention), st.tuples(st.text("bc"), recurrent))
)
recipes = st.one_of(attention, recurrent, groups)
specs = st.builds(
    lambda first_specs, shared: CacheSpec((*first_specs, *(SharedSpec(0) for _ in range(shared)))),
    st.lists(recipes, min_size=1, max_size=3),
    st.integers(0, 2),
)


@given(specs)
def test_json_round_trips(spec: CacheSpec) -> None:
    text = to_json(spec)
    assert from_json(text) == spec
    assert to_json(from_json(text)) == text


@pytest.mark.parametrize("text", ["affine8,select=12%", "raw,select=7:0"])
def test_spec_text_has_one_json_form(text: str) -> None:
    spec = parse(text, 3)
    assert to_json(from_json(to_json(spec))) == to_json(spec)


def test_page_counts_beyond_the_limit_are_refused() -> None:
    text = to_json(parse("affine8,select=7:0", 1)).replace('"pages":7', f'"pages":{10**30}')
    with pytest.raises(SpecError, match=r"select\.pages is 10"):
        from_json(text)


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
    | st.sampled_from(["raw", "affine", "rotation", "all", "recurrent", "cache", 10**400, 2.0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def places(value: object) -> list[tuple[object, object]]:
    """Yield every (container, key) of a JSON value."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def read_header(text: str) -> None:
    try:
        spec = from_json(text)
    except SpecError as error:
        assert str(error).isprintable()
        return
    assert from_json(to_json(spec)) == spec


@given(specs, st.data())
def test_an_edited_header_is_a_spec_or_a_spec_error(spec: CacheSpec, data: st.DataObject) -> None:
    root = {"spec": json.loads(to_json(spec))}
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(places(root)))
        edit = data.draw(st.sampled_from(["set", "swap", "drop", "add"]))
        if edit == "drop" and holder is not root:
            del holder[key]
        elif edit == "add" and isinstance(holder, dict):
            holder[data.draw(st.text(max_size=5))] = data.draw(junk)
        elif edit == "swap":
            other, name = data.draw(st.sampled_from(places(root)))
            holder[key] = json.loads(json.dumps(other[name]))
        else:
            holder[key] = data.draw(junk)
    read_header(json.dumps(root["spec"]))


@given(specs, st.data())
def test_damaged_text_is_a_spec_or_a_spec_error(spec: CacheSpec, data: st.DataObject) -> None:
    text = to_json(spec)
    position = data.draw(st.integers(0, len(text)))
    read_header(
        text[:position]
        + data.draw(st.text(max_size=3))
        + text[position + data.draw(st.integers(0, 3)) :]
    )


OLD = (
    '{"kind":"cache","layers":[{"kind":"attention","keys":{"name":"raw"},"values":{"name":"raw"},"retention":'
    '{"name":"window","window":64,"sinks":0},"page":64,"tail":null,"slack":16,"dense_until":0,'
    '"prefill":"dense","step":1,"capacity":null,"dtype":null,"chunk":null,"value_dim":null}]}'
)


@pytest.mark.parametrize("text", [OLD, OLD.replace(',"sinks":0', "")])
def test_window_in_an_old_header_has_no_sinks(text: str) -> None:
    spec = from_json(text)
    assert spec == CacheSpec((LayerSpec(Raw(), Raw(), Window(64)),))
    assert to_json(spec) == OLD, "so stores find what is named by it"
    assert spec != parse("raw,window=64", 1) and spec == parse("raw,window=64,sinks=0", 1)


HEADER = to_json(parse("turbo4,window=64,sinks=0", 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"codebook"', '"codebok"', "nearest: codebook"),
        ('"codebook"', '"builtins.eval"', "allowed: one of raw, affine, codebook"),
        ('"window","window"', '"rotation","window"', "retention.name is 'rotation'"),
        ('"attention"', '"attntion"', "nearest: attention"),
        ('"page":64', '"pag":64', "spec.layers[0] has the key 'pag'; allowed: keys, values"),
        ('"page":64', '"page":64,"page":64', "a key occurs twice"),
        ('"page":64', '"page":true', "page is True; allowed: a whole number"),
        ('"page":64', '"page":64.0', "page is 64.0; allowed: a whole number"),
        ('"page":64', '"page":"64"', "page is '64'; allowed: a whole number"),
        ('"page":64', '"page":0', "layers[0].page is 0; allowed: 1 to 2147483647"),
        ('"page":64', '"page":NaN', "NaN is not a number"),
        ('"bits":4', '"bits":7', "bits is 7"),
        ('"bits":4', '"bits":null', "bits is None"),
        ('"dtype":null', '"dtype":"int8"', "allowed: one of float32, bfloat16"),
        ('"dense"', '"deep"', "prefill is 'deep'; allowed: one of dense, stored"),
        ('"window":64,', "", "allowed: an object with 'window'"),
        ('{"kind":"cache"', '{"kind":"recurrent"', "spec.kind is 'recurrent'"),
        ("]}", "", "cannot be read as JSON"),
    ],
)
def test_invalid_header_names_the_position(old: str, new: str, message: str) -> None:
    assert old in HEADER
    with pytest.raises(SpecError) as caught:
        from_json(HEADER.replace(old, new, 1))
    assert message in str(caught.value)


@pytest.mark.parametrize("value", ["1e999", "true", '"1"', "1" + "0" * 400, str(2**53 + 1)])
def test_scale_is_a_float_that_round_trips(value: str) -> None:
    spec = CacheSpec((LayerSpec(Affine(4, 32, Diagonal(((0.5,),))), Raw(), KeepAll()),))
    text = to_json(spec)
    assert from_json(text.replace("0.5", "2")).layers[0].keys.frame == Diagonal(((2.0,),))
    with pytest.raises(SpecError, match="allowed: a finite number"):
        from_json(text.replace("0.5", value))


@pytest.mark.parametrize("depth", [100, 400, 5_000, 200_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    deep = '{"name":"product","frames":[' * depth + "]}" * depth
    for text in ("[" * depth, HEADER.replace('{"name":"rotation","seed":0}', deep)):
        read_header(text)


def test_key_missing_in_an_old_header_has_its_default() -> None:
    assert from_json(HEADER.replace('"slack":16,', "")) == from_json(HEADER)


def test_affine_codecs_of_an_old_header_become_corrected() -> None:
    """Decoding does not depend on how scales were computed; new pages are sealed as usual."""
    spec = parse("affine4", 1)
    text = to_json(spec)
    older = text.replace(',"corrected":true', "")
    assert older.count("corrected") == 0 < text.count("corrected")
    assert from_json(older) == spec
    plain = from_json(text.replace('"corrected":true', '"corrected":false'))
    assert plain.layers[0].keys == Affine(4, 32, corrected=False)
