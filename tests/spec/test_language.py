"""Test the spec language: accepted specs, refused specs and their errors."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant.codecs import CODECS, Affine, Raw
from kvant.codecs.frames import Identity, Rotation
from kvant.contracts import Frame
from kvant.errors import SpecError
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, RecurrentSpec, SharedSpec
from kvant.retention import KeepAll, Window
from kvant.spec import as_spec, describe_spec, from_json, parse, split_specs, to_json
from kvant.spec.language import check_spec_or_auto, parse_auto_bits


def parse_first(text: str) -> LayerSpec:
    layer = parse(text, 4).layers[0]
    assert isinstance(layer, LayerSpec)
    return layer


def describe_codec(codec) -> str:
    """Return a short form of a codec: affine4/32, codebook3, raw; with an r if rows are rotated."""
    rotated = "r" if isinstance(codec.frame, Rotation) else ""
    group = f"/{codec.group}" if hasattr(codec, "group") else ""
    return f"{codec.name}{getattr(codec, 'bits', '')}{group}{rotated}"


FORMATS = {
    "raw": ("raw", "raw"),
    "affine8": ("affine8/64", "affine8/64"),
    "affine6": ("affine6/64", "affine6/64"),
    "affine5": ("affine5/32", "affine5/32"),
    "affine4": ("affine4/32", "affine4/32"),
    "affine3": ("affine3/32", "affine3/32"),
    "affine2": ("affine2/16", "affine2/16"),
    "affine8v4": ("affine8/64", "affine4/32"),
    "turbo4": ("codebook4r", "codebook4r"),
    "turbo4v2": ("codebook4r", "codebook2r"),
    "turbo3v3": ("codebook3r", "codebook3r"),
    "affine8/turbo3": ("affine8/64", "codebook3r"),
    "raw/affine4": ("raw", "affine4/32"),
    "bf16/affine4": ("raw", "affine4/32"),
    "q8_0": ("affine8/32", "affine8/32"),
    "q4_0": ("affine4/32", "affine4/32"),
    "q8_0/q4_0": ("affine8/32", "affine4/32"),
    "fp8": ("fp8", "fp8"),
    "fp8/affine4": ("fp8", "affine4/32"),
    "turbo3/fp8": ("codebook3r", "fp8"),
    "fp8,rotate": ("fp8r", "fp8r"),
    "fp8/affine8,rotate,group=32": ("fp8r", "affine8/32r"),
    "raw,edge=2:fp8": ("fp8", "fp8"),
    "aura": ("codebook4r", "codebook4r"),
    "aura3": ("codebook3r", "codebook3r"),
    "aura4v2": ("codebook4r", "codebook2r"),
    "aura2v4": ("codebook2r", "codebook4r"),
    "affine4,group=128": ("affine4/128", "affine4/128"),
    "affine8v4,group=16": ("affine8/16", "affine4/16"),
    "affine4,rotate": ("affine4/32r", "affine4/32r"),
    "affine8/turbo3,rotate,group=32": ("affine8/32r", "codebook3r"),
    "raw/affine4,rotate": ("raw", "affine4/32r"),
    "q4_0,group=32": ("affine4/32", "affine4/32"),
}


@pytest.mark.parametrize(("text", "sides"), FORMATS.items())
def test_a_format_names_the_codec_of_each_side(text: str, sides: tuple[str, str]) -> None:
    layer = parse_first(text)
    assert (describe_codec(layer.keys), describe_codec(layer.values)) == sides


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("raw", None),
        ("bf16", torch.bfloat16),
        ("f16", torch.float16),
        ("f32/f32", torch.float32),
        ("affine4/bf16", torch.bfloat16),
        ("affine4", None),
    ],
)
def test_aliases_set_the_dtype_of_dense_rows(text: str, dtype: torch.dtype | None) -> None:
    assert parse_first(text).dtype == dtype


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("window=4096", "retention", Window(4096, 4)),
        ("window=4096,sinks=0", "retention", Window(4096, 0)),
        ("window=2,sinks=4", "retention", Window(2, 4)),  # more sinks than window is valid
        ("sinks=4", "retention", KeepAll(4)),
        ("tail=0", "tail", 0),
        ("tail=128", "tail", 128),
        ("start=512", "dense_until", 512),
        ("page=128", "page", 128),
        ("slack=0", "slack", 0),
        ("prefill=stored", "prefill", "stored"),
        ("step=1", "step", 1),
        ("capacity=4096", "capacity", 4096),
        ("window=64,capacity=64", "capacity", 64),
    ],
)
def test_an_option_sets_its_field(option: str, field: str, value: object) -> None:
    assert getattr(parse_first(f"affine4,{option}"), field) == value


@pytest.mark.parametrize(
    ("text", "codec", "bits_a_value"), [("q8_0", Affine(8, 32), 9), ("q4_0", Affine(4, 32), 5)]
)
def test_llama_cpp_names_mean_groups_of_32(text: str, codec: Affine, bits_a_value: int) -> None:
    """The same groups, plus a bias per scale: half a bit per value more than there."""
    assert parse(text, 2).layers == (LayerSpec(codec, codec, KeepAll()),) * 2
    fields = codec.fields(128).values()
    assert sum(8 * field.dtype.itemsize * field.width for field in fields) == 128 * bits_a_value
    assert codec.tail == (0 if text == "q8_0" else 128)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("affine4,window=64", "affine4,window=64,sinks=4"),
        ("affine4,window=64,sinks=0", "affine4,window=64,sinks=0"),
        ("raw,window=64,sinks=9,select=7", "raw,window=64,sinks=9,select=7"),
        ("affine4,sinks=4", "affine4,sinks=4"),
        ("turbo3", "turbo3"),
        ("affine8/affine4", "affine8v4"),
        ("turbo4v2", "turbo4v2"),
        ("affine8/turbo2", "affine8/turbo2"),
    ],
)
def test_options_set_the_number_of_sinks(text: str, expected: str) -> None:
    assert describe_spec(parse(text, 3)) == expected
    assert parse(expected, 3) == parse(text, 3)


def test_recipe_built_by_hand_has_the_sinks_it_names() -> None:
    layer = LayerSpec(Raw(), Raw(), Window(8))
    assert as_spec(layer, 1).layers == (layer,) and layer.retention.sinks == 0
    assert describe_spec(as_spec(layer, 1)) == "raw,window=8,sinks=0"


def test_omitted_options_keep_their_defaults() -> None:
    assert parse("affine4", 2).layers == (LayerSpec(Affine(4, 32), Affine(4, 32), KeepAll()),) * 2


def test_option_order_and_spaces_do_not_matter() -> None:
    assert parse(" affine4 , sinks=4,\twindow=64 ", 2) == parse("affine4,window=64,sinks=4", 2)


EDGES = {
    "affine4,edge=1": "8448",
    "affine4,edge=0": "4444",
    "affine4,edge=2": "8888",
    "affine4,edge=9": "8888",
    "affine4,edge=1:affine6": "6446",
    "turbo4,edge=1:turbo3": "3443",
}


LAYERS = {
    "affine4,layers=0:affine8": "8444",
    "affine4,layers=1-2:affine6+3:affine8": "4668",
    "affine4,layers=0-3:affine8": "8888",
    "turbo2,layers=0:turbo4v3+2-3:turbo3": "4233",
}


@pytest.mark.parametrize(("text", "widths"), [*EDGES.items(), *LAYERS.items()])
def test_layers_have_formats_of_their_own(text: str, widths: str) -> None:
    assert "".join(str(layer.keys.bits) for layer in parse(text, 4).layers) == widths


@pytest.mark.parametrize(("option", "index"), [("edge=1", 0), ("layers=1", 1)])
def test_layers_keep_the_other_options(option: str, index: int) -> None:
    text = f"turbo4v2,window=64,page=128,group=16,{option}:affine8/raw"
    layers = parse(text, 3).layers
    other, main = layers[index], layers[1 - index]
    assert (other.keys, other.values) == (Affine(8, 16), Raw())
    assert (other.retention, other.page) == (main.retention, main.page) == (Window(64, 4), 128)


def test_layers_and_edge_give_the_same_recipes() -> None:
    """The JSON is the header of a file and part of the key of a prefix."""
    edge, layers = parse("turbo3,edge=1", 4), parse("turbo3,layers=0:affine8+3:affine8", 4)
    assert edge == layers and to_json(edge) == to_json(layers)
    assert to_json(layers) != to_json(parse("turbo3,layers=0:affine8", 4))
    assert from_json(to_json(layers)) == layers


NUM_LAYERS = 6
FORMAT = st.sampled_from(["raw", "affine8", "affine4", "affine8v4", "turbo3", "fp8/turbo2"])


@st.composite
def draw_spec(draw: st.DrawFn) -> str:
    """Draw a spec with runs of layers and the options that describe_spec prints."""
    ends = sorted(draw(st.sets(st.integers(0, NUM_LAYERS - 1), max_size=4)))
    pairs = zip(ends[::2], ends[1::2], strict=False)
    runs = "+".join(f"{first}-{last}:{draw(FORMAT)}" for first, last in pairs)
    options = ["window=64", "window=64,sinks=0", "sinks=4", "prune=snapkv:25%:adaptive"]
    words = [draw(FORMAT), f"layers={runs}" if runs else ""]
    words += (
        draw(st.sampled_from(["", *options])),
        draw(st.sampled_from(["", "select=25%", "select=7:0"])),
    )
    return ",".join(word for word in words if word)


@given(draw_spec())
def test_described_spec_parses_to_the_same_spec(text: str) -> None:
    spec = parse(text, NUM_LAYERS)
    assert parse(describe_spec(spec), NUM_LAYERS) == spec


def test_description_lists_runs_of_layers() -> None:
    text = "turbo3,layers=0:affine8v4+4-5:turbo4"
    assert describe_spec(parse(text, 9)) == text
    assert describe_spec(parse("affine4,edge=1", 5)) == "affine4,layers=0:affine8+4:affine8"


def test_layer_beyond_the_last_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"names layer 6 of 6 that attend, .* allowed: 0 to 5; nearest: 5"
    ):
        parse("turbo3,layers=0:affine8+5-6:turbo4", 6)


@pytest.mark.parametrize(
    ("text", "bits"),
    [("auto:3.25bits", 3.25), (" auto:4 bits ", 4.0), ("auto", None), ("auto:1GiB", None)],
)
def test_auto_takes_a_limit_of_bits(text: str, bits: float | None) -> None:
    assert parse_auto_bits(text) == bits
    check_spec_or_auto(text)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("auto:bits", "auto:3.25bits"),
        ("auto:3.bits", "auto:3bits"),
        ("auto:-1bits", "auto:1bits"),
        ("auto:3.25bit", "auto:3.25bits"),
        ("auto:3.25 Bits", "auto:3.25bits"),
        ("auto: 3.25bits", "auto:3.25bits"),
        ("auto:100bits", "auto:99bits"),
        ("auto:3.25bits,max_kl=1", "auto:3.25bits"),
    ],
)
def test_unclear_limit_of_bits_is_refused(text: str, nearest: str) -> None:
    with pytest.raises(SpecError, match=f"; nearest: {nearest}$"):
        check_spec_or_auto(text)


def list_seeds(text: str, num_layers: int = 8) -> list[int]:
    layers = parse(text, num_layers).layers
    return [side.frame.seed for layer in layers for side in (layer.keys, layer.values)]


def test_keys_values_and_layers_have_different_rotations() -> None:
    all_seeds = (
        list_seeds("turbo4")
        + list_seeds("turbo4,seed=1")
        + list_seeds("affine4,rotate,seed=2147483647")
    )
    assert len(set(all_seeds)) == len(all_seeds) == 48
    assert all(0 <= seed < 2**53 for seed in all_seeds)


def test_seeds_depend_on_the_layer_and_not_on_the_layer_count() -> None:
    assert list_seeds("turbo4", 8)[:6] == list_seeds("affine4,rotate", 3)
    assert list_seeds("turbo4,seed=0") == list_seeds("turbo4")


# Refused specs: the text, and the parts that the message must contain.
REFUSED = [
    ("", "format ''", "nearest: raw"),
    ("affine7", "'affine7'", "nearest: affine8"),
    ("affine", "'affine'", "nearest: affine8"),
    ("codebook", "'codebook'", "nearest: "),
    ("Affine4", "'Affine4'", "nearest: affine4"),
    ("Q8_0", "'Q8_0'", "nearest: q8_0"),
    ("q5_1", "'q5_1'", "nearest: affine5"),
    ("turbo4v", "'turbo4v'", "nearest: turbo4v"),
    ("turbov4", "'turbov4'", "nearest: turbo4"),
    ("turbo4v5", "'turbo4v5'", "nearest: turbo4v"),
    ("turbo16", "'turbo16'", "nearest: turbo"),
    ("turbo8v4", "'turbo8v4'", "nearest: affine8/turbo4"),
    ("aura8v4", "'aura8v4'", "nearest: affine8/aura4"),
    ("aura4v8", "'aura4v8'", "nearest: aura4/affine8"),
    ("turbo8", "'turbo8'", "nearest: affine8"),
    ("aura8v8", "'aura8v8'", "nearest: affine8"),
    ("turbo8/turbo4", "'turbo8' on one side", "nearest: affine8"),
    ("turbo8v4/raw", "'turbo8v4'", "nearest: turbo4"),
    ("turbo", "'turbo'", "nearest: turbo4"),
    ("TurboQuant", "'TurboQuant'", "nearest: turbo4"),
    ("k8v4", "'k8v4'", "nearest: affine8v4"),
    ("q4_1", "'q4_1'", "nearest: q4_0"),
    ("iq4_nl", "'iq4_nl'", "nearest: q4_0"),
    ("q5_0/f16", "'q5_0' on one side", "nearest: affine5"),
    ("int8", "'int8'", "nearest: affine8"),
    ("4", "'4'", "nearest: affine4"),
    ("8bit", "'8bit'", "nearest: affine8"),
    ("fp8_e5m2", "'fp8_e5m2'", "nearest: fp8"),
    ("quanto", "'quanto'", "nearest: affine4"),
    ("dynamic", "'dynamic'", "nearest: raw"),
    ("none", "'none'", "nearest: raw"),
    ("fp16", "'fp16'", "nearest: f16"),
    ("bfloat16", "'bfloat16'", "nearest: bf16"),
    ("float32", "'float32'", "nearest: f32"),
    ("aura5", "'aura5'", "nearest: aura"),
    ("aura6", "'aura6'", "nearest: aura"),
    ("aura16", "'aura16'", "nearest: aura"),
    ("aura4v", "'aura4v'", "nearest: aura4v"),
    ("aurav4", "'aurav4'", "nearest: aura4"),
    ("affine4/", "''", "nearest: raw"),
    ("affine4/afine8", "'afine8' on one side of 'affine4/afine8'", "nearest: affine8"),
    ("raw/affine4/raw", "'affine4/raw'", "nearest: affine4"),
    ("affine8v4/raw", "'affine8v4'", "nearest: affine8"),
    ("bf16/f16", "'bf16/f16'", "nearest: bf16"),
    ("raw/f16", "'raw/f16'", "nearest: f16"),
    ("fp9", "'fp9'", "nearest: fp8"),
    ("fp8v4", "'fp8v4'", "nearest: fp8"),
    ("fp8,group=32", "'group=32'", "nearest: affine8,group=32"),
    ("fp8,seed=1", "'seed=1'", "allowed with turbo formats and with rotate"),
    ("auto", "auto", "nearest: affine8"),
    ("auto:4GB", "auto", "nearest: affine8"),
    ("raw,smooth", "nothing to smooth", "nearest: affine8,smooth"),
    ("affine4,smooth=2", "smooth=2", "nearest: smooth"),
    ("window=64", "'window=64'", "nearest: affine8,window=64"),
    ("rotate", "'rotate'", "nearest: affine8,rotate"),
    ("affine4,", "''", "nearest: no comma"),
    ("affine4,,rotate", "''", "nearest: no comma"),
    ("affine4,windw=64", "'windw=64'", "nearest: window=64"),
    ("affine4,WINDOW=64", "'WINDOW=64'", "nearest: window=64"),
    ("affine4,window =64", "'window =64'", "nearest: window=64"),
    ("affine4,window=64,window=64", "'window=64'", "each option once"),
    ("affine4,window", "'window'", "nearest: window=1"),
    ("affine4,window=", "'window='", "nearest: window=1"),
    ("affine4,window=0", "'window=0'", "nearest: window=1"),
    ("affine4,window=-4", "'window=-4'", "nearest: window=4"),
    ("affine4,window= 64", "'window= 64'", "nearest: window=64"),
    ("affine4,window=4k", "'window=4k'", "nearest: window=4096"),
    ("affine4,window=1_0", "'window=1_0'", "nearest: window=1"),
    ("affine4,window=\u0664", "'window=", "nearest: window=1"),
    ("affine4,window=3000000000", "3000000000", "nearest: window=2147483647"),
    ("affine4,window=" + "9" * 5000, "window=9", "nearest: window=2147483647"),
    ("affine4,sinks=-1", "'sinks=-1'", "from 0 to"),
    ("affine4,tail=-1", "'tail=-1'", "from 0 to"),
    ("affine4,page=0", "'page=0'", "nearest: page=64"),
    ("affine4,page=32", "'page=32'", "nearest: page=64"),
    ("affine4,page=100", "'page=100'", "nearest: page=128"),
    ("affine4,step=0", "'step=0'", "nearest: step=1"),
    ("affine4,step=65537", "step is 65537", "nearest: 65536"),
    ("affine4,capacity=0", "'capacity=0'", "nearest: capacity=1"),
    ("affine4,group=48", "'group=48'", "nearest: group=32"),
    ("affine4,group=0", "'group=0'", "nearest: group=16"),
    ("affine4,rotate=1", "'rotate=1'", "nearest: rotate"),
    ("affine4,prefill=deep", "'prefill=deep'", "nearest: prefill=dense"),
    ("affine4,prefill", "'prefill'", "nearest: prefill=dense"),
    ("affine4,edge", "'edge'", "nearest: edge=1"),
    ("affine4,edge=x", "'edge=x'", "nearest: edge=1"),
    ("affine4,edge=2:", "''", "nearest: raw"),
    ("affine4,edge=2:affine9", "'affine9'", "nearest: affine8"),
    ("affine4,edge=2:affine8:group=16", "'affine8:group=16'", "nearest: affine8"),
    ("affine4,edge=2:auto", "auto", "nearest: affine8"),
    ("affine4,layers", "'layers'", "nearest: layers=0:affine8"),
    ("affine4,layers=", "'layers='", "nearest: layers=0:affine8"),
    ("affine4,layers=turbo4", "'turbo4' names no layers", "nearest: layers=4:affine8"),
    ("affine4,layers=0..1:turbo4", "'0..1:turbo4' names no", "nearest: layers=0-1:turbo4"),
    ("affine4,layers=0:turbo4+", "'' names no layers", "nearest: layers=0:affine8"),
    ("affine4,layers=0", "''", "nearest: raw"),
    ("affine4,layers=0:affine9", "'affine9'", "nearest: affine8"),
    ("affine4,layers=0:auto", "auto", "nearest: affine8"),
    ("affine4,layers=2:turbo4+1:turbo3", "layers 1;", "nearest: 3"),
    ("affine4,layers=0-2:turbo4+2:turbo3", "layers 2;", "nearest: 3"),
    ("affine4,layers=2-1:turbo4", "layers 2-1;", "nearest: 2"),
    ("affine4,layers=4:turbo4", "names layer 4 of 4", "nearest: 3"),
    ("affine4,layers=524288:turbo4", "layers 524288;", "nearest: 524287"),
    ("affine4,edge=1,layers=1:turbo4", "'edge' with layers", "nearest: no edge"),
    ("turbo3,layers=0:raw,group=32", "'group=32'", "nearest: affine8,group=32"),
    ("affine8,select", "'select'", "nearest: select=1"),
    ("affine8,select=0", "'select=0'", "nearest: select=1"),
    ("affine8,select=0%", "'select=0%'", "nearest: select=1%"),
    ("affine8,select=101%", "'select=101%'", "nearest: select=100%"),
    ("affine8,select=12.5%", "'select=12.5%'", "nearest: select=12%"),
    ("affine8,select=1e3", "'select=1e3'", "nearest: select=1"),
    ("affine8,select=3:x", "'select=3:x'", "nearest: select=3:2"),
    ("affine8,select=-3", "'select=-3'", "nearest: select=1"),
    ("raw,group=32", "'group=32'", "nearest: affine8,group=32"),
    ("turbo4,group=32", "'group=32'", "nearest: affine8,group=32"),
    ("q4_0,group=64", "'group=64': q4_0", "nearest: affine4,group=64"),
    ("raw,rotate", "'rotate': raw", "nearest: affine8,rotate"),
    ("turbo4,rotate", "turbo4 is rotated already", "nearest: turbo4"),
    ("raw/turbo4,rotate", "raw/turbo4 is rotated already", "nearest: raw/turbo4"),
    ("affine4,seed=1", "'seed=1'", "allowed with turbo formats and with rotate"),
    ("affine4,window=65,capacity=64", "'window=65' with capacity=64", "nearest: window=64"),
    ("affine4,sinks=65,capacity=64", "'sinks=65' with capacity=64", "nearest: sinks=64"),
]


@pytest.mark.parametrize(("text", "read", "way_out"), REFUSED)
def test_error_quotes_the_input_and_the_way_out(text: str, read: str, way_out: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text, 4)
    message = str(caught.value)
    assert read in message
    assert way_out in message
    assert message.isprintable()
    assert len(message) < 400


@given(st.text(max_size=40) | st.text("afine48/,=:v rtub0123window", max_size=40))
def test_any_text_is_a_spec_or_a_spec_error(text: str) -> None:
    try:
        spec = parse(text, 2)
    except SpecError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 400
        return
    assert from_json(to_json(spec)) == spec


def test_empty_layer_list_is_refused() -> None:
    with pytest.raises(SpecError, match="num_layers=0"):
        parse("raw", 0)


def test_as_spec_takes_text_a_recipe_or_all_recipes() -> None:
    layer = parse_first("affine4,window=64")
    whole = CacheSpec((layer,) * 3)
    assert as_spec("affine4,window=64", 3) == as_spec(layer, 3) == as_spec(whole, 3) == whole


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (CacheSpec((RecurrentSpec(),)), "has 1 layers, the cache 3"),
        (CacheSpec((SharedSpec(0), RecurrentSpec(), RecurrentSpec())), r"layers\[0\].layer is 0"),
        (CacheSpec((RecurrentSpec(), SharedSpec(5), RecurrentSpec())), "nearest: 0"),
        (CacheSpec((1, 2, 3)), r"layers\[0\] is 1"),  # type: ignore[arg-type]
        (None, "None is not a spec"),
        (LayerSpec(Raw(), Raw(), KeepAll(), page=0), "page is 0; allowed: 1 to"),
        (LayerSpec(Raw(), Raw(), KeepAll(), tail=-1), "tail is -1; allowed: 0 to"),
        (LayerSpec(Raw(), Raw(), Window(2**40)), "retention.window is"),
        (CacheSpec((GroupSpec(()),) * 3), r"parts is \[\]"),
    ],
)
def test_as_spec_validates_handmade_recipes(spec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        as_spec(spec, 3)


@dataclass(frozen=True)
class Toy:
    frame: ClassVar[Frame] = Identity()


def test_registered_codec_is_a_format_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, "toy", Toy)
    assert (parse_first("toy").keys, parse_first("toy/affine8").keys) == (Toy(), Toy())
    assert isinstance(parse_first("raw,edge=1:toy").values, Toy)
    with pytest.raises(SpecError, match=r"f32, (.*, )?toy; nearest: toy"):
        parse("toyy", 1)


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("raw", ["raw"]),
        ("none,raw,step=1,raw,step=256", ["none", "raw,step=1", "raw,step=256"]),
        (
            "affine4,rotate,window=64,sinks=4, affine8",
            ["affine4,rotate,window=64,sinks=4", "affine8"],
        ),
        ("affine8,edge=2:turbo4,raw/affine4", ["affine8,edge=2:turbo4", "raw/affine4"]),
        ("turbo3,layers=0-1:raw+3:fp8,raw", ["turbo3,layers=0-1:raw+3:fp8", "raw"]),
    ],
)
def test_specs_and_options_are_told_apart(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs
