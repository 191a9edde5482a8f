"""Test codecs, scores and stores from outside: registered by a program, or listed by a package."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import kvant
from engine.test_engine import generate_alone, make_engine, make_prompts
from foreign import ENTRIES, LongKeys, MemoryStore, RowSteps
from hf.zoo import build
from kvant import ExtensionError, SpecError, checkpoints
from kvant.codecs import Fp8
from kvant.errors import StoreError
from kvant.native import get_library
from kvant.spec.formats import AUTO_WORD, FAMILY_WIDTHS, SIDE_FORMATS, TWO_WIDTH_FORMATS
from kvant.spec.options import OPTION_PARSERS
from kvant.spec.tables import CODEC_TABLE, SCORE_TABLE
from kvant.stores import FolderStore, open_store
from kvant.types import Codec, Frame, Identity, Retention, Score, ScoreInput

Install = Callable[..., str]


def fill(cache: kvant.Cache, count: int = 200) -> kvant.Cache:
    for layer in cache:
        layer.append(*torch.randn(2, 1, 2, count, 16))
    return cache


@dataclass(frozen=True)
class Recent(Retention):
    EQUAL: ClassVar[str] = "affine8,window=50,sinks=4"
    window: ClassVar[int | None] = 50
    sinks: ClassVar[int] = 4


# ---- registering


def test_registered_names_work_in_specs() -> None:
    kvant.register_codec("rowsteps", RowSteps)
    kvant.register_score("longkeys", LongKeys)
    text = "rowsteps/affine4,layers=0:rowsteps,prune=longkeys:25%:adaptive"
    spec = kvant.parse(text, 3)
    layer = spec.layers[1]
    assert isinstance(layer, kvant.LayerSpec) and layer.prune is not None
    assert (layer.keys, layer.prune.score) == (RowSteps(), LongKeys())
    described = kvant.spec.describe_spec(spec)
    assert described == text and kvant.parse(described, 3) == spec


@pytest.mark.parametrize("wrong", ["", "Steps", "1steps", "a,b", "a/b", "a:b", "a=b", "a+b", "ä"])
def test_names_that_no_spec_can_hold_are_refused(wrong: str) -> None:
    with pytest.raises(ExtensionError, match="allowed are names that match"):
        kvant.register_codec(wrong, RowSteps)
    assert not CODEC_TABLE.list_extensions()


@pytest.mark.parametrize(
    "word",
    [
        *SIDE_FORMATS,
        *TWO_WIDTH_FORMATS,
        *FAMILY_WIDTHS,
        *OPTION_PARSERS,
        *("codebook", AUTO_WORD.word, "affine7", "turbo9"),
    ],
)
def test_words_of_specs_are_no_names_of_codecs(word: str) -> None:
    """Regression: affine7 and affine8 would be described as affine7v8."""
    with pytest.raises(ExtensionError, match="choose another"):
        kvant.register_codec(word, RowSteps)


def test_a_name_is_never_replaced() -> None:
    kvant.register_codec("rowsteps", RowSteps)
    kvant.register_codec("rowsteps", RowSteps)
    other = dataclass(frozen=True)(type("Other", (RowSteps,), {}))
    with pytest.raises(ExtensionError, match="RowSteps'> is registered under this name"):
        kvant.register_codec("rowsteps", other)
    assert CODEC_TABLE["rowsteps"] is RowSteps
    with pytest.raises(ExtensionError, match="kvant has a score of this name"):
        kvant.register_score("keydiff", LongKeys)
    for scheme in ("file", "redis"):
        with pytest.raises(ExtensionError, match="choose another"):
            kvant.register_store(scheme, MemoryStore)


def test_one_of_many_threads_registers_a_name() -> None:
    classes = [dataclass(frozen=True)(type(f"Steps{n}", (RowSteps,), {})) for n in range(8)]
    refused, barrier = list[type](), threading.Barrier(8)

    def register(codec_class: type[Codec]) -> None:
        barrier.wait()
        try:
            kvant.register_codec("raced", codec_class)
        except ExtensionError:
            refused.append(codec_class)

    threads = [threading.Thread(target=register, args=(each,)) for each in classes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {*classes} - {*refused} == {CODEC_TABLE["raced"]}


@dataclass(frozen=True)
class Mutable(RowSteps):
    table: Any = field(default_factory=list)


@dataclass(frozen=True)
class Needy(RowSteps):
    bits: int


@dataclass(frozen=True)
class Named(RowSteps):
    name: str = "steps"


@dataclass
class Thawed(Codec):
    frame: ClassVar[Frame] = Identity()
    fields, seal, open = RowSteps.fields, RowSteps.seal, RowSteps.open


@dataclass(frozen=True)
class Sealless(Codec):
    frame: ClassVar[Frame] = Identity()

    def fields(self, dim: int) -> Any:
        return {}


@dataclass(frozen=True)
class Frameless(RowSteps):
    frame = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Bare:
    """It inherits no default of the contract."""

    frame: ClassVar[Frame] = Identity()
    fields, seal, open = RowSteps.fields, RowSteps.seal, RowSteps.open


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Mutable, "Mutable cannot be made .*unhashable"),
        (Needy, "Needy cannot be made from its name and a file: .*'bits'"),
        (Named, "Named cannot be made .*a field is called name"),
        (Thawed, "Thawed is not a frozen dataclass"),
        (Sealless, "Sealless cannot be made .*abstract methods open, seal"),
        (Frameless, "Frameless has no frame"),
        (Bare, "Bare has no exact, limit, tail"),
        (RowSteps(), "RowSteps.* is not a frozen dataclass"),
        (object, "object is not a frozen dataclass"),
    ],
)
def test_classes_that_are_no_codecs_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ExtensionError, match=f"the codec 'wrong': {message}"):
        kvant.register_codec("wrong", wrong)
    assert "wrong" not in CODEC_TABLE


def test_classes_that_are_no_scores_are_refused() -> None:
    with pytest.raises(ExtensionError, match="'keys' names itself 'longkeys': use one name"):
        kvant.register_score("keys", LongKeys)
    stub = dataclass(frozen=True)(type("Stub", (Score,), {"name": "stub"}))
    with pytest.raises(ExtensionError, match=r"Stub cannot be .*abstract method score_rows"):
        kvant.register_score("stub", stub)


def test_stores_without_a_method_are_refused() -> None:
    """`Tiers` would count each call as a failure of the store, and read nothing."""
    half = type("Half", (), {"url": "half://", "has": MemoryStore.has, "get": MemoryStore.get})
    kvant.register_store("half", lambda url: half())
    with pytest.raises(ExtensionError, match=r"Half has no put, drop: kvant\.types"):
        open_store("half://a")
    with pytest.raises(ExtensionError, match="3 takes no URL"):
        kvant.register_store("three", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("window", "sinks", "message"),
    [
        (0, 0, "window=0 and sinks=0: allowed are"),
        (True, 0, "window=True"),
        (4, 0.5, r"sinks=0\.5"),
        (4, -1, "sinks=-1"),
        (4, None, "has no sinks"),
    ],
)
def test_rules_without_two_whole_numbers_are_refused(window: Any, sinks: Any, message: str) -> None:
    rule = type("Rule", (Retention,), {"window": window, "sinks": sinks})
    with pytest.raises(ExtensionError, match=message):
        kvant.register_retention("rule", dataclass(frozen=True)(rule))


def test_rules_that_the_kernels_cannot_follow_are_refused() -> None:
    """Masks, kernels and plans read the window alone."""
    later = {"window": 9, "find_first_retained": lambda self, length: length // 2}
    rule = dataclass(frozen=True)(type("Later", (Retention,), later))
    with pytest.raises(ExtensionError, match=r"find_first_retained\(9\) is 4, and 0"):
        kvant.register_retention("later", rule)


def test_a_registered_rule_is_a_window_under_its_name(tmp_path: Path) -> None:
    kvant.register_retention("recent", Recent)
    named, plain = kvant.Cache(2, "affine8,retain=recent"), kvant.Cache(2, Recent.EQUAL)
    for layers in zip(named, plain, strict=True):
        keys, values = torch.randn(2, 1, 2, 300, 16)
        for layer in layers:
            layer.append(keys, values)
        assert all(map(torch.equal, layers[0].read(), layers[1].read()))
    assert named.nbytes == plain.nbytes and named.held == plain.held == 54
    described = kvant.spec.describe_spec(named.spec)
    assert described == "affine8,retain=recent" and kvant.parse(described, 2) == named.spec
    kvant.save(named, tmp_path / "cache.kv")
    assert kvant.load(tmp_path / "cache.kv").spec == named.spec
    for other in ("window=4", "sinks=4", "prune=keydiff:50%"):
        with pytest.raises(SpecError, match="with retain: both say which rows stay"):
            kvant.parse(f"raw,retain=recent,{other}", 1)


def test_unknown_rules_name_those_that_are_there() -> None:
    with pytest.raises(SpecError, match="rule, of none here; nearest: window=4096"):
        kvant.parse("raw,retain=recent", 1)
    kvant.register_retention("recent", Recent)
    for wrong in ("=recant", "=", "", "=window", "=all"):
        with pytest.raises(SpecError, match="of recent; nearest: retain=recent"):
            kvant.parse(f"raw,retain{wrong}", 1)


# ---- packages


def test_a_package_is_found_by_the_names_it_lists(install: Install) -> None:
    module = install()
    kvant.Cache(1, "affine4,prune=keydiff:50%")
    assert module not in sys.modules
    spec = kvant.parse("steps,prune=keys:25%", 1)
    assert module in sys.modules
    assert kvant.spec.describe_spec(spec) == "steps,prune=keys:25%"
    assert open_store("pile://a").url == "pile://a"
    assert isinstance(open_store("./pile:a"), FolderStore)
    with pytest.raises(SpecError, match="f32, steps; nearest: steps"):
        kvant.parse("stpes", 1)
    with pytest.raises(StoreError, match="memory://, pile://, redis://"):
        open_store("pyle://a")


def test_only_the_exact_name_imports_a_package(install: Install) -> None:
    module = install(ENTRIES | {"codecs:affine8": "Steps", "codecs:Steps": "Steps"})
    for name in ("Steps", "steps ", "affine8", "steps2", f"{module}:Steps", "kvant_steps"):
        header = kvant.spec.to_json(kvant.parse("raw", 1)).replace('"raw"', f'"{name}"')
        with pytest.raises(SpecError, match="one of raw, affine, codebook, fp8, steps"):
            kvant.spec.from_json(header)
    assert module not in sys.modules


def test_no_entry_point_is_read_for_names_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.platform.extensions.entry_points", None)
    cache = fill(kvant.Cache(2, "affine8/turbo4,edge=1:fp8,prune=keydiff:50%"))
    kvant.spec.from_json(kvant.spec.to_json(cache.spec))
    open_store("/tmp/nowhere")


@pytest.mark.parametrize(
    ("entries", "source", "reason"),
    [
        ({"codecs:steps": "Missing"}, "", "AttributeError: .*Missing"),
        ({"codecs:steps": "Steps"}, "import nowhere_at_all", "ModuleNotFoundError: .*nowhere"),
        ({"codecs:steps": "Steps"}, "1 /", "SyntaxError"),
        ({"codecs:steps": "NUMBER"}, "NUMBER = 3", "ExtensionError: .*3 is not a frozen"),
    ],
)
def test_a_broken_package_is_named(
    entries: dict[str, str],
    source: str,
    reason: str,
    install: Install,
) -> None:
    install(entries, source=source, name=f"kvant-broken{len(source)}")
    pattern = rf"the codec 'steps' of the package kvant-broken\d+ 1.2 cannot be used: {reason}"
    for _ in range(2):
        with pytest.raises(ExtensionError, match=f"{pattern}.*; update or uninstall kvant-broken"):
            kvant.parse("steps", 1)
    assert kvant.parse("affine4", 1)


def test_two_packages_of_one_name_are_refused(install: Install) -> None:
    install({"codecs:steps": "Steps"}, name="kvant-a")
    install({"codecs:steps": "Steps"}, name="kvant-b", version="2.0")
    message = "several packages list it: kvant-a 1.2, kvant-b 2.0: uninstall all but one"
    with pytest.raises(ExtensionError, match=message):
        kvant.parse("steps", 1)


def test_a_package_may_register_what_it_lists(install: Install) -> None:
    source = "import foreign, kvant\nclass Steps(foreign.RowSteps): pass\n"
    source += "import dataclasses\nSteps = dataclasses.dataclass(frozen=True)(Steps)\n"
    source += "kvant.register_codec('steps', Steps)"
    module = install({"codecs:steps": "Steps"}, source=source, name="kvant-own")
    with pytest.raises(ExtensionError, match=r"the package kvant-own 1\.2 lists a codec"):
        kvant.register_codec("steps", RowSteps)
    codec = kvant.parse("steps", 1).layers[0].keys  # type: ignore[union-attr]
    assert type(codec) is sys.modules[module].Steps
    (extension,) = CODEC_TABLE.list_extensions()
    assert extension.package == ("kvant-own", "1.2")


def test_a_package_may_list_what_another_module_defines(install: Install) -> None:
    module = install({"codecs:steps": "RowSteps"}, name="kvant-front")
    codec = kvant.parse("raw", 1).layers[0]
    assert isinstance(codec, kvant.LayerSpec)
    spec = kvant.CacheSpec((replace(codec, keys=RowSteps()),))
    assert kvant.spec.describe_spec(spec) == "RowSteps/raw"
    import_module(module)
    assert kvant.spec.describe_spec(spec) == "steps/raw"
    assert kvant.spec.from_json(kvant.spec.to_json(spec)) == spec
    kvant.register_codec("steps", RowSteps)


def test_import_reads_no_entry_points() -> None:
    program = (
        "import kvant, sys; kvant.SpecError; assert 'kvant.platform.extensions' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- everywhere else


@pytest.mark.parametrize(
    "wrong",
    [
        lambda sealed: {"steps": sealed["steps"]},
        lambda sealed: {**sealed, "more": sealed["top"]},
        lambda sealed: {**sealed, "steps": sealed["steps"].float()},
        lambda sealed: {**sealed, "steps": sealed["steps"][..., :1]},
        lambda sealed: {**sealed, "top": sealed["top"][..., :1, :]},
    ],
)
def test_a_codec_that_seals_other_fields_than_it_declares_is_refused(wrong: Any) -> None:
    """A missing field would keep old bytes, and a narrow one would be broadcast."""
    seal = {"seal": lambda self, rows: wrong(RowSteps().seal(rows))}
    kvant.register_codec("wrong", dataclass(frozen=True)(type("Wrong", (RowSteps,), seal)))
    cache = kvant.Cache(1, "wrong")
    with pytest.raises(kvant.CacheError, match=r"Wrong\.seal returns .*`fields` declares"):
        fill(cache)
    assert cache.length == 0
    assert fill(cache, 10).length == 10


def test_the_reference_backend_reads_a_registered_codec() -> None:
    kvant.register_codec("rowsteps", RowSteps)
    cache = fill(kvant.Cache(1, "rowsteps"))
    first, *others = str(kvant.explain(cache[0].view())).splitlines()
    assert first == "reference: reads this view"
    native = next(line for line in others if line.startswith("not native: "))
    assert get_library().functions is None or native == "not native: keys of RowSteps"


def test_codecs_with_the_form_of_a_kernel_or_a_second_name_are_refused() -> None:
    seal = {"seal": lambda self, rows: Fp8().seal(rows)}
    mine = dataclass(frozen=True)(type("Mine", (Fp8,), seal))
    with pytest.raises(kvant.ExtensionError, match="kernels read the formats of kvant alone"):
        kvant.register_codec("mine", mine)
    with pytest.raises(kvant.ExtensionError, match="it is the codec 'fp8' already"):
        kvant.register_codec("float8", Fp8)
    kvant.register_codec("rowsteps", RowSteps)
    with pytest.raises(kvant.ExtensionError, match="it is the codec 'rowsteps' already"):
        kvant.register_codec("others", RowSteps)


def test_a_codec_that_opens_other_rows_is_refused() -> None:
    opened = {"open": lambda self, fields: RowSteps().open(fields).mean(-1, keepdim=True)}
    kvant.register_codec("narrow", dataclass(frozen=True)(type("Narrow", (RowSteps,), opened)))
    cache = fill(kvant.Cache(1, "narrow"))
    with pytest.raises(kvant.CacheError, match=r"Narrow\.open returns .* return all rows"):
        cache[0].read()


@pytest.mark.parametrize("spec", ["rowsteps", "rowsteps/affine8,window=40,sinks=2", "raw/rowsteps"])
def test_an_engine_serves_a_registered_codec_as_alone(spec: str) -> None:
    kvant.register_codec("rowsteps", RowSteps)
    model, prompts = build("llama"), make_prompts(5, longest=150)
    expected = [
        generate_alone(model, prompt, f"{spec},prefill=stored", max_new_tokens=80)
        for prompt in prompts
    ]
    with make_engine(model, f"{spec},prefill=stored", max_sequences=3) as engine:
        streams = [engine.submit(p, max_new_tokens=80, ignore_end=True) for p in prompts]
        assert [list(stream.result().tokens) for stream in streams] == expected
    gc.collect()


def test_prefixes_in_a_registered_store_are_restored(install: Install) -> None:
    install({"codecs:steps": "Steps"})
    stores = dict[str, MemoryStore]()
    kvant.register_store("pile", lambda url: stores.setdefault(url, MemoryStore(url)))
    model, prompt = build("llama"), make_prompts(1, longest=9)[0] * 60
    results = []
    for _ in range(2):
        prefixes = kvant.Prefixes(store="pile://one")
        with make_engine(model, "steps", prefixes=prefixes) as engine:
            results.append(engine.submit(prompt, max_new_tokens=5, ignore_end=True).result())
            prefixes.flush()
        prefixes.close()
    assert results[0].tokens == results[1].tokens
    assert results[1].usage.restored_tokens >= 64


def test_a_registered_score_prunes_and_may_need_queries() -> None:
    @dataclass(frozen=True)
    class Seen(Score):
        name: ClassVar[str] = "seen"
        num_queries: ClassVar[int] = 8

        def score_rows(self, rows: ScoreInput) -> torch.Tensor:
            assert rows.queries is not None and rows.queries.shape[2] <= 8
            return (rows.queries.mean((1, 2))[:, None] * rows.keys).sum(-1)

    kvant.register_score("seen", Seen)
    kvant.register_score("longkeys", LongKeys)
    assert {"seen", "longkeys"} < {*SCORE_TABLE}
    model, tokenizer = checkpoints.load(None)
    for score in ("seen", "longkeys"):
        session = kvant.Session(model, tokenizer, f"affine8,prune={score}:50%", template=False)
        list(session.send("import os\n" * 60, max_new_tokens=4))
        assert session.cache.held < 0.8 * session.cache.length
