"""Test the front of the package: `attach` for a block, `explain`, `plan` of a path."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import kvant
from hf.zoo import build
from kvant import checkpoints, demo
from kvant.hf import get_attachments
from kvant.models import layer_shapes


def test_every_public_name_exists() -> None:
    for name in kvant.__all__:
        assert getattr(kvant, name).__name__.rpartition(".")[2] == name
    assert set(kvant.__all__) <= vars(kvant).keys()  # looked up once
    assert set(kvant.__all__) <= set(dir(kvant))
    assert kvant.platform.sizes.parse_size("1KiB") == 1024  # modules too, without importing them
    with pytest.raises(AttributeError, match="module 'kvant' has no attribute 'nonsense'"):
        kvant.nonsense  # noqa: B018
    assert not hasattr(kvant, "nonsense.more") and not hasattr(kvant, "spec.")


@pytest.mark.parametrize("name", [name for name in kvant.__all__ if name.endswith("Spec")])
def test_type_hints_of_specs_resolve(name: str) -> None:
    hints = get_type_hints(getattr(kvant, name))
    assert name != "LayerSpec" or hints["dtype"] == torch.dtype | None


def test_model_is_attached_within_a_block() -> None:
    model = build("llama")
    with kvant.attach(model, "affine8", guard=False) as attached:
        assert attached is model and next(iter(get_attachments(model).values())).spec == "affine8"
    assert not get_attachments(model)


def test_block_restores_the_previous_attachment() -> None:
    model = build("llama")
    kvant.attach(model, "raw")
    with pytest.raises(KeyError), kvant.attach(model, "affine8", guard=False):
        raise KeyError
    assert next(iter(get_attachments(model).values())).spec == "raw"
    with kvant.attach(model, "affine8", guard=False):
        kvant.detach(model)
    assert next(iter(get_attachments(model).values())).spec == "raw"
    kvant.detach(model)


def test_explain_accepts_a_model() -> None:
    model = build("llama")
    plain = kvant.explain(model)
    assert "raw" in plain
    with kvant.attach(model, "affine4", guard=False):
        assert "affine4" in kvant.explain(model)


def test_explain_accepts_a_cache() -> None:
    mixed = (*kvant.parse("affine4,window=256", 2).layers, kvant.SharedSpec(0), kvant.EmptySpec())
    group = kvant.GroupSpec((("rows", mixed[0]), ("state", kvant.RecurrentSpec())))
    cache = kvant.Cache(spec=kvant.CacheSpec((*mixed, kvant.RecurrentSpec(), group)))
    assert str(kvant.explain(cache)).splitlines() == [
        "layers 0-1: affine4,window=256,sinks=4; empty, so its backend is not known yet",
        "layer 2: reads the rows of layer 0",
        "layer 3: no cache",
        "layer 4: a recurrent state, read by the model",
        "layer 5: rows: affine4,window=256,sinks=4; empty, so its backend is not known yet"
        " and state: a recurrent state, read by the model",
    ]
    cache = kvant.Cache(2, "affine4", backend="reference")
    for layer in cache:
        layer.append(*torch.randn(2, 1, 2, 300, 64))
    assert kvant.explain(cache) == "layers 0-1: affine4; reference reads it"
    for first in (cache.fork(), kvant.merge([cache, cache])):
        assert kvant.explain(first) == kvant.explain(cache)


def test_explain_lists_backends_that_cannot_read_a_cache() -> None:
    cache = kvant.Cache(1, "raw")
    view = cache[0].append(*torch.randn(2, 1, 2, 10, 64))
    first, *refused = str(kvant.explain(view)).splitlines()
    backend = first.partition(":")[0]
    assert kvant.explain(cache) == "; ".join([f"layer 0: raw; {backend} reads it", *refused])


def test_explain_accepts_a_session() -> None:
    model, tokenizer = checkpoints.load(None)
    session = kvant.Session(model, tokenizer, "affine4", template=False)
    list(session.send("import os\n", max_new_tokens=2))
    text = str(kvant.explain(session))
    assert "affine4" in text and text == str(kvant.explain(session.cache))
    assert "affine8" in str(kvant.explain(kvant.cache_for(model, "affine8")))


@pytest.mark.parametrize(("wrong", "name"), [(kvant.Cache, "Cache"), (3, "int"), ("raw", "str")])
def test_explain_refuses_other_objects(wrong: object, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} cannot be explained: give a view, a cache, "):
        kvant.explain(wrong)


@pytest.mark.parametrize("path", [demo.PATH, demo.PATH / "config.json", str(demo.PATH)])
def test_plan_accepts_a_path(path: str | Path) -> None:
    config = checkpoints.load_config(str(demo.PATH))
    assert kvant.plan(path, "affine8").nbytes == kvant.plan(config, "affine8").nbytes
    assert kvant.plan(path, "affine8").layers == tuple(layer_shapes(config))


def test_plan_refuses_a_path_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        kvant.plan(tmp_path)
    with pytest.raises(ValueError, match="No such file"):
        kvant.plan("nowhere.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="a JSON object is needed"):
        kvant.plan(tmp_path)


def test_torch_seed_applies() -> None:
    model, tokenizer = checkpoints.load(None)

    def draw() -> list[int]:
        options = {"temperature": 1.0, "max_new_tokens": 8}
        return [step.token for step in kvant.generate(model, tokenizer, "import ", **options)]

    torch.manual_seed(3)
    first = draw()
    other = draw()
    torch.manual_seed(3)
    assert draw() == first != other


def test_repr_shows_cached_tokens_and_bytes() -> None:
    model, tokenizer = checkpoints.load(None)
    session = kvant.Session(model, tokenizer, "affine4", template=False)
    session.read("import os\n")
    assert repr(session).startswith("Session(affine4: 1 turn, ")
    assert repr(session).endswith(f" {kvant.platform.sizes.format_size(session.cache.nbytes)})")
    with kvant.Engine(model, tokenizer, "affine8", max_bytes="1MiB") as engine:
        assert repr(engine).startswith("Engine(affine8: 0 running, 0 waiting, ")
        assert repr(engine).endswith(" of 1 MiB)")
    cache = kvant.Cache(2, "affine4,window=64,sinks=0")
    assert repr(cache) == "Cache(affine4,window=64,sinks=0: 2 layers, length 0, 0 B)"


def test_prefilled_text_can_be_rewound() -> None:
    model, tokenizer = checkpoints.load(None)
    session = kvant.Session(model, tokenizer, template=False)
    session.read("import os\nimport sys\n")
    tokens = session.tokens
    list(session.send("def ", max_new_tokens=4))
    session.rewind(session.turns[0].end)
    assert session.tokens == tokens and len(session.turns) == 1


def test_token_ids_are_prefilled_unchanged() -> None:
    model, tokenizer = checkpoints.load(None)
    session, other = (kvant.Session(model, tokenizer, template=False) for _ in range(2))
    session.read(tokenizer.encode("import os\n"))
    other.read("import os\n")
    assert session.tokens == other.tokens
    with pytest.raises(kvant.PromptError, match="no tokens: there is nothing to read"):
        session.read("")
    assert len(session.turns) == 1 and session.tokens == other.tokens


def test_sizes_may_have_units() -> None:
    planned = kvant.plan(demo.PATH, "affine4")
    assert planned.largest_context("1MiB") == planned.largest_context(2**20)
