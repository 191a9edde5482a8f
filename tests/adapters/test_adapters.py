"""Test LoRA adapters of PEFT: outputs equal the merged model's; unfit and hostile ones refused."""

from __future__ import annotations

import copy
import json
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvant
from hf.zoo import VOCABULARY, build
from kvant.adapters import AdapterSwitch, check_adapters, load_adapter, load_adapters
from kvant.errors import AdapterError
from kvant.native import get_library
from peft_files import change_config, save_adapter

FAMILIES = {
    "llama": {
        "r": 3,
        "lora_alpha": 7,
        "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"],
        "rank_pattern": {"v_proj": 5, r"layers\.[12]\.self_attn.q_proj": 2},
        "alpha_pattern": {"^model.layers.0.mlp.down_proj": 3},
    },
    "gpt2": {"r": 2, "fan_in_fan_out": True, "target_modules": r".*\.(c_attn|c_proj|c_fc)"},
    "qwen2": {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "k_proj", "gate_proj"]},
}
IDS = torch.arange(3, 40)[None] % VOCABULARY
WEIGHTS_NAME = "adapter_model.safetensors"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@torch.no_grad()
def compute_logits(model: Any, adapter: Any = None) -> torch.Tensor:
    with AdapterSwitch(model).use(adapter):
        logits: torch.Tensor = model(IDS).logits
    return logits


@pytest.fixture
def llama() -> Any:
    return build("llama")


@pytest.fixture
def folder(llama: Any, tmp_path: Path) -> Path:
    """An adapter of q_proj and v_proj of a llama, with r=2."""
    save_adapter(llama, tmp_path, r=2, target_modules=["q_proj", "v_proj"])
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_equal_those_of_the_merged_model(family: str, tmp_path: Path) -> None:
    model = build(family)
    merged = save_adapter(model, tmp_path, **FAMILIES[family])
    before, adapter = compute_logits(model), load_adapter(tmp_path, model)
    expected = compute_logits(merged)
    assert (before - expected).abs().max() > 1
    torch.testing.assert_close(compute_logits(model, adapter), expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(compute_logits(model), before)
    assert load_adapter(tmp_path, model).key == adapter.key


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_product_is_added_over_rounded_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvant.weights.packing.MIN_PACKED_VALUES", 1)
    model = build(family)
    assert kvant.pack(model, "affine8").has_rounded_layers
    dense = copy.deepcopy(model)  # with the rounded values
    with pytest.warns(UserWarning, match="rounded"):
        kvant.unpack(dense)
    expected = compute_logits(save_adapter(dense, tmp_path, **FAMILIES[family]))
    logits = compute_logits(model, load_adapter(tmp_path, model))
    torch.testing.assert_close(logits, expected, atol=2e-2, rtol=1e-3)


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
def test_product_is_added_over_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvant.weights.packing.MIN_PACKED_VALUES", 1)
    model = build("llama").bfloat16()
    merged = save_adapter(model.float(), tmp_path, r=2, target_modules=["q_proj"])
    expected, adapter = compute_logits(merged), load_adapter(tmp_path, model.bfloat16())
    assert kvant.pack(model).layers  # after the load: the switch finds the packed weights
    error = (compute_logits(model, adapter).float() - expected).norm() / expected.norm()
    assert error < 0.1


def test_only_the_thread_of_the_switch_sees_the_adapter(llama: Any, folder: Path) -> None:
    adapter, plain, others = load_adapter(folder, llama), compute_logits(llama), []
    with AdapterSwitch(llama).use(adapter):
        with_adapter = llama(IDS).logits
        thread = threading.Thread(target=lambda: others.append(compute_logits(llama)))
        thread.start()
        thread.join()
    assert torch.equal(others[0], plain) and not torch.equal(with_adapter, plain)
    with pytest.raises(ZeroDivisionError), AdapterSwitch(llama).use(adapter):
        raise ZeroDivisionError
    assert torch.equal(compute_logits(llama), plain)


def test_names_of_equal_adapters_share_one(llama: Any, folder: Path, tmp_path: Path) -> None:
    save_adapter(llama, tmp_path / "c", seed=1, r=2, target_modules=["q_proj", "v_proj"])
    adapters = load_adapters({"a": folder, "b": folder, "c": tmp_path / "c"}, llama)
    assert adapters["a"] is adapters["b"] and adapters["a"].key != adapters["c"].key
    change_config(folder, lora_alpha=9)
    assert load_adapter(folder, llama).key != adapters["a"].key
    for name in ("../a", "a/../b", "", "a b", "-a", "a" * 129, "a\n"):
        with pytest.raises(AdapterError, match="adapter name"):
            load_adapters({name: folder}, llama)


UNSUPPORTED: dict[str, Any] = {
    "peft_type": "LOHA",
    "use_dora": True,
    "bias": "all",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1],
    "layer_replication": [[0, 2]],
    "target_parameters": ["experts.up"],
    "layers_to_transform": [1],
    "exclude_modules": ["lm_head"],
    "init_lora_weights": "pissa",
    "field_of_a_later_version": 1,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_adapters_are_refused_by_name(llama: Any, folder: Path, field: str) -> None:
    change_config(folder, **{field: UNSUPPORTED[field]})
    with pytest.raises(AdapterError, match=field) as error:
        load_adapter(folder, llama)
    assert "\n" not in str(error.value)
    with pytest.raises(AdapterError, match=field):
        check_adapters({"a": folder})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "r=0: a whole number from 1 to 65536"),
        ({"r": 10**400}, "a whole number from 1 to 65536"),
        ({"r": 3}, r"\[2, 64\]: \[3, 64\] is needed, for r=3"),
        ({"r": True}, "r=True"),
        ({"r": 10**12}, "a whole number from 1 to 65536"),
        ({"lora_alpha": float("nan")}, "NaN is not a number"),
        ({"lora_alpha": 10**400}, "a finite number"),
        ({"lora_alpha": 1e39}, "exceeds the range of torch.float32"),
        ({"rank_pattern": {"q_proj": 3}}, r"\[3, 64\] is needed, for r=3"),
        ({"rank_pattern": [1]}, "an object is needed"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern"),
        ({"target_modules": []}, "names or a regular expression"),
        ({"target_modules": ["q_proj"]}, "has tensors, but is no target"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "has no tensors, but is a target"),
        ({"target_modules": "(q_proj"}, "missing \\), unterminated"),
        ({"use_rslora": 1}, "true or false"),
    ],
)
def test_invalid_configurations_are_refused(
    llama: Any,
    folder: Path,
    fields: dict[str, Any],
    message: str,
) -> None:
    change_config(folder, **fields)
    with pytest.raises(AdapterError, match=message) as error:
        load_adapter(folder, llama)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_pattern_that_never_ends_is_refused(
    llama: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvant.adapters.patterns.MATCH_TIMEOUT_S", 1.0)
    change_config(folder, target_modules="((.*)*)*!")
    with pytest.raises(AdapterError, match="takes more than 1 s"):
        load_adapter(folder, llama)


@pytest.mark.parametrize("name", ["a\n\x1b[31mred", LAYER + ".lora_A.weight"])
@pytest.mark.parametrize("dtype", ["F32", "X\n\x1bZ"])
def test_errors_show_no_raw_bytes_of_a_file(
    llama: Any, folder: Path, name: str, dtype: str
) -> None:
    entry = {"dtype": dtype, "shape": [1 << 40, 64], "data_offsets": [0, 512]}
    header = json.dumps({name: entry}).encode()
    (folder / WEIGHTS_NAME).write_bytes(struct.pack("<Q", len(header)) + header + bytes(512))
    with pytest.raises(AdapterError) as error:
        load_adapter(folder, llama)
    assert str(error.value).isprintable()


def test_unknown_home_is_refused_by_the_name_of_the_adapter() -> None:
    with pytest.raises(AdapterError, match=r"adapter 'poet': ~no_such_user/x: "):
        check_adapters({"poet": "~no_such_user/x"})


def test_compiled_models_are_refused(llama: Any, folder: Path) -> None:
    model = copy.deepcopy(llama)
    model.model.layers[0].compile(backend="eager")
    with pytest.raises(AdapterError, match="the model is compiled"):
        load_adapter(folder, model)


def test_adapter_without_an_effect_is_refused(llama: Any, folder: Path) -> None:
    adapter = load_adapter(folder, llama)
    switch = AdapterSwitch(llama)
    with pytest.raises(AdapterError, match="has no effect"), switch.use(adapter):
        llama.model.embed_tokens(torch.zeros(1, 1, dtype=torch.long))
    with switch.use(adapter):
        llama(torch.zeros(1, 1, dtype=torch.long))
    with switch.use(adapter):  # a replay: nothing of it is seen
        pass


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 1, "r": 2}', "[" * 100_000])
def test_configuration_must_be_a_json_object(llama: Any, folder: Path, text: str) -> None:
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        load_adapter(folder, llama)


CHANGED_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "not finite": ({f"{LAYER}.lora_A.weight": torch.full((2, 64), torch.nan)}, "not finite"),
    "shape": ({f"{LAYER}.lora_B.weight": torch.zeros(63, 2)}, r"\[63, 2\]: \[64, 2\] is needed"),
    "dtype": ({f"{LAYER}.lora_B.weight": torch.zeros(64, 2).double()}, "is of F64"),
    "one side": ({f"{LAYER}.lora_B.weight": None}, "has lora_A alone"),
    "traversal": (
        {f"base_model.model.../../etc.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"},
        "LlamaForCausalLM has none",
    ),
    "embedding": ({"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "save_embedding_layers"),
    "norm": (
        {f"base_model.model.model.norm.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"},
        "no target",
    ),
}


@pytest.mark.parametrize("change", CHANGED_TENSORS)
def test_tensors_that_do_not_fit_are_refused(llama: Any, folder: Path, change: str) -> None:
    changed, message = CHANGED_TENSORS[change]
    tensors = load_file(folder / WEIGHTS_NAME) | changed
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / WEIGHTS_NAME)
    with pytest.raises(AdapterError, match=message):
        load_adapter(folder, llama)


def test_layers_of_other_classes_are_refused(llama: Any, folder: Path) -> None:
    names = [f"base_model.model.model.norm.lora_{side}.weight" for side in "AB"]
    tensors = {name: torch.zeros(2, 2) for name in names}
    save_file(load_file(folder / WEIGHTS_NAME) | tensors, folder / WEIGHTS_NAME)
    change_config(folder, target_modules=["q_proj", "v_proj", "model.norm"])
    with pytest.raises(AdapterError, match=r"'model\.norm' is of class LlamaRMSNorm"):
        load_adapter(folder, llama)
    llama.model.layers[1].self_attn.q_proj.weight = llama.model.layers[0].self_attn.q_proj.weight
    save_adapter(llama, folder, r=2, target_modules=["q_proj", "v_proj"])
    with pytest.raises(AdapterError, match="sharing its weight"):
        load_adapter(folder, llama)


@pytest.mark.parametrize("nbytes", [0, 7, 100, -1])
def test_truncated_files_are_refused(llama: Any, folder: Path, nbytes: int) -> None:
    file = folder / WEIGHTS_NAME
    file.write_bytes(file.read_bytes()[:nbytes])
    with pytest.raises(AdapterError, match="corrupt or incomplete"):
        load_adapter(folder, llama)
    with pytest.raises(AdapterError, match="corrupt or incomplete"):
        check_adapters({"a": folder})


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1 << 40, 64], "data_offsets": [0, 512]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 512]},
        {"dtype": "F32", "shape": [2, 64], "data_offsets": [1 << 60, (1 << 60) + 512]},
        {"dtype": "F32", "shape": [2, -64], "data_offsets": [0, 512]},
        "nothing",
    ],
)
def test_lying_headers_are_refused(llama: Any, folder: Path, entry: Any) -> None:
    header = json.dumps({f"{LAYER}.lora_A.weight": entry}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(512)
    (folder / WEIGHTS_NAME).write_bytes(content)
    with pytest.raises(AdapterError, match="corrupt or incomplete"):
        load_adapter(folder, llama)


def test_missing_files_are_named(llama: Any, folder: Path) -> None:
    (folder / WEIGHTS_NAME).rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=f"no {WEIGHTS_NAME}"):
        load_adapter(folder, llama)
    with pytest.raises(AdapterError, match="cannot be read"):
        load_adapter(folder / "nowhere", llama)
