"""Test wrapped, nested and stored models: which one is attached."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Blip2Config, DynamicCache, OPTConfig, PreTrainedModel, T5Config

import kvant
from hf.zoo import FAMILIES, build
from kvant.hf import PairedCache, SupportLevel, TransformersCache, get_support

# Warnings of torch.compile and peft.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:Warning")

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4}


class Adapted(nn.Module):
    """A wrapper like those of peft: unknown attributes come from the inner model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def get_base_model(self) -> Any:
        return self.base_model["model"]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.get_base_model(), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_base_model()(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_base_model().generate(*args, **kwargs)


def lora(model: PreTrainedModel) -> Any:
    peft = pytest.importorskip("peft", reason="no peft here: tried with a wrapper of its shape")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2)
    return peft.get_peft_model(model, config).eval()


WRAPPERS = {
    "an adapter": Adapted,
    "compiled": torch.compile,
    "a compiled adapter": lambda model: torch.compile(Adapted(model)),
    "an adapter of a compiled one": lambda model: Adapted(torch.compile(model)),
    "peft": lora,
}


class Words:
    """A tokenizer of numbers."""

    chat_template = None

    def encode(self, text: str, **_: object) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int], **_: object) -> str:
        return " ".join(map(str, tokens))


def ids(count: int = 6) -> Tensor:
    return torch.randint(3, 100, (1, count), generator=torch.Generator().manual_seed(0))


def cache_of_generate(model: Any, **options: Any) -> Any:
    """Return the cache that a plain `generate` used."""
    options = {"input_ids": ids()} | options
    out = model.generate(**options, max_new_tokens=3, return_dict_in_generate=True)
    return out.past_key_values


@pytest.mark.parametrize("name", WRAPPERS)
def test_model_in_a_wrapper_is_attached_and_detached(name: str) -> None:
    """Regression: the wrapper was attached, which has no effect: `generate` used a transformers
    cache.
    """
    wrapped = WRAPPERS[name](build("llama"))
    kvant.attach(wrapped, "affine8")
    assert isinstance(cache_of_generate(wrapped), TransformersCache)
    kvant.detach(wrapped)
    assert isinstance(cache_of_generate(wrapped), DynamicCache)


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_model_generates_like_the_inner_one(name: str) -> None:
    """Regression: it was treated as a plain callable with unknown layers."""
    wrapped, words = WRAPPERS[name](build("llama")), Words()
    prompt, short = ids()[0].tolist(), {"max_new_tokens": 20}
    expected = [step.token for step in kvant.generate(build("llama"), words, prompt, **short)]
    session = kvant.Session(wrapped, words, "raw", template=False)
    assert [step.token for step in session.send(prompt, **short)] == expected
    assert isinstance(kvant.cache_for(wrapped, "affine8"), TransformersCache)
    assert kvant.probe(wrapped, None, "affine8").divergence.num_positions > 0


class Forwarding(transformers.LlamaForCausalLM):
    """A subclass whose forward names no argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Naming(transformers.LlamaForCausalLM):
    """A subclass whose forward names one argument and forwards the others."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs)


@pytest.mark.parametrize("model_class", [Forwarding, Naming])
def test_subclass_that_forwards_its_arguments_is_treated_as_its_base(model_class: Any) -> None:
    plain, words = build("llama"), Words()
    model = model_class(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    prompt = ids()[0].tolist()
    expected, actual = (
        [step.token for step in kvant.generate(model_, words, prompt, max_new_tokens=8)]
        for model_ in (plain, model)
    )
    assert actual == expected
    assert get_support(model).level is SupportLevel.RAGGED_BATCH
    kvant.attach(model, guard=False)
    assert isinstance(cache_of_generate(model), TransformersCache)


class Delegating(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A model whose forward, and all forwards of its bases, name no argument."""

    config_class, _supports_sdpa = transformers.LlamaConfig, True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = transformers.LlamaModel(config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_forward_with_only_kwargs_may_take_a_cache() -> None:
    assert isinstance(kvant.cache_for(Delegating(build("llama").config)), TransformersCache)


def test_learned_prompt_is_refused() -> None:
    """The inner model would answer without the learned prompt."""
    wrapped = Adapted(build("llama"))
    wrapped.active_peft_config = type("Config", (), {"is_prompt_learning": True})()
    for use in (kvant.attach, kvant.cache_for, lambda model: kvant.Session(model, Words())):
        with pytest.raises(TypeError, match=r"learnt prompt.*get_base_model"):
            use(wrapped)


@pytest.mark.parametrize("other", [nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2)), 3])
def test_models_outside_transformers_are_refused(other: Any) -> None:
    for use in (kvant.attach, kvant.detach, kvant.cache_for):
        with pytest.raises(
            TypeError,
            match=f"{type(other).__name__} is (no model: |neither a transformers)",
        ):
            use(other)


def blip2(text: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model whose forward needs a picture, and whose `generate` calls the inner model."""
    sight = SMALL | {"image_size": 30, "patch_size": 10}
    former = SMALL | {"vocab_size": 64, "encoder_hidden_size": 32}
    config = Blip2Config(
        vision_config=sight,
        qformer_config=former,
        text_config=text.to_dict(),
        num_query_tokens=4,
        image_token_index=99,
    )
    torch.manual_seed(0)
    model = transformers.Blip2ForConditionalGeneration(config).eval()
    inputs = {
        "pixel_values": torch.randn(1, 3, 30, 30),
        "input_ids": torch.tensor([[99] * 4 + [2, 5, 6, 7]]),
    }
    return model, inputs


def opt() -> Any:
    sizes = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return OPTConfig(vocab_size=100, word_embed_proj_dim=32, max_position_embeddings=200, **sizes)


def t5() -> Any:
    sizes = {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    return T5Config(vocab_size=100, decoder_start_token_id=0, **sizes)


@pytest.mark.parametrize(("text", "model_class"), [(opt(), TransformersCache), (t5(), PairedCache)])
def test_generating_part_is_attached_with_its_model(text: Any, model_class: type) -> None:
    """Regression: a check without a picture raised and left it attached."""
    model, inputs = blip2(text)
    plain = model.generate(**inputs, max_new_tokens=3)
    for guard in (True, False):
        kvant.attach(model, "affine8", guard=guard)
        assert isinstance(cache_of_generate(model, **inputs), model_class)
        kvant.detach(model)
        assert not any("_kvant_attachment" in module.__dict__ for module in model.modules())
    assert torch.equal(model.generate(**inputs, max_new_tokens=3), plain)
    kvant.attach(model, "raw")
    assert torch.equal(model.generate(**inputs, max_new_tokens=3), plain)


def test_model_that_needs_more_than_tokens_names_its_text_part() -> None:
    model, _ = blip2(opt())
    with pytest.raises(TypeError, match=r"needs pixel_values.*model\.language_model"):
        kvant.generate(model, Words(), [5, 6])
    assert kvant.probe(model, None, "affine8").divergence.num_positions > 0
    assert len(list(kvant.generate(model.language_model, Words(), [5, 6], max_new_tokens=2))) == 2


@pytest.mark.parametrize("before", [None, "affine8,window=64"])
def test_error_keeps_the_previous_attachment(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    if before is not None:
        kvant.attach(model, before, guard=False)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise TypeError("a forward that needs a picture")

    with monkeypatch.context() as patched:
        patched.setattr(model, "forward", fail)
        for spec in ("affine4", "auto"):
            with pytest.raises(TypeError, match="picture"):
                kvant.attach(model, spec)
    cache = cache_of_generate(model)
    assert isinstance(cache, TransformersCache) == (before is not None)
    if before is not None:
        assert cache.spec.layers[0].retention.window == 64


def test_error_keeps_the_previous_attachments_of_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the inner model lost its attachment when attaching the outer one failed."""
    model, inputs = blip2(opt())
    kvant.attach(model.language_model, "affine8,window=64", guard=False)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise TypeError("a forward that died")

    with monkeypatch.context() as patched:
        patched.setattr(model.language_model, "forward", fail)
        with pytest.raises(TypeError, match="died"):
            kvant.attach(model, "affine4")
    assert "_kvant_attachment" not in model.__dict__
    assert cache_of_generate(model, **inputs).spec.layers[0].retention.window == 64


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_reloaded_attached_model_is_attached(name: str) -> None:
    """Regression: it could not be loaded; neither could one with folded attention."""
    model, file = build(name), io.BytesIO()
    kvant.attach(model, "affine8", guard=False)
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    kvant.detach(model)
    assert isinstance(cache_of_generate(read), TransformersCache)
    assert torch.equal(read.generate(ids(), max_new_tokens=3), stored_alone(model))
    kvant.detach(read)
    assert isinstance(cache_of_generate(read), DynamicCache)


def stored_alone(model: PreTrainedModel) -> Tensor:
    kvant.attach(model, "affine8", guard=False)
    tokens: Tensor = model.generate(ids(), max_new_tokens=3)
    return tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_every_family_attach_and_detach_without_trace(name: str) -> None:
    model = build(name)
    before = [set(module.__dict__) for module in model.modules()]
    kvant.attach(model, "raw")
    kvant.detach(model)
    assert [set(module.__dict__) for module in model.modules()] == before


def test_folder_of_an_attached_model_equals_that_of_the_plain_one(tmp_path: Any) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "plain")
    kvant.attach(model, "affine8", guard=False)
    model.save_pretrained(tmp_path / "attached")
    plain, attached = ((tmp_path / name / "config.json") for name in ("plain", "attached"))
    assert plain.read_text() == attached.read_text()
