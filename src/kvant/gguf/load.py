"""Load a model from a GGUF file: an empty model, filled tensor by tensor.

Weights stay as they are in the file: blocks of 4 to 8 bits become codes for the kernels
(blocks.py), without a dense copy. transformers reads the configuration.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvant.codecs.affine import Affine
from kvant.contracts import Fields
from kvant.gguf.blocks import CODED_TYPES, DENSE_TYPES, CodedType, view_dense
from kvant.gguf.families import (
    FAMILIES,
    ROPE_FACTORS,
    SCALED_LAYER_KIND,
    Family,
    check_file,
    find_rope_factor,
    require_package,
)
from kvant.gguf.file import GGUFError, GGUFHeader, TensorEntry
from kvant.gguf.tokenizer import find_end_tokens
from kvant.platform.sizes import format_count
from kvant.weights.packed_matrix import (
    DENSE_DTYPES,
    CodedMatrix,
    DenseMatrix,
    WeightMatrix,
    explain_unreadable,
)
from kvant.weights.packed_weight import PackedWeight
from kvant.weights.packing import pack

# Settings of a file, and their names in a configuration.
CONFIG_NAMES = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
WINDOW_KEY = "attention.sliding_window"  # 0: no window
DEFAULT_WINDOW = ("gemma2",)  # if the key is absent; the others have none then
LARGE_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}  # their scores have a scale that no file states
log = logging.getLogger("kvant")


def load_config(path: Path) -> Any:
    """Return the configuration of transformers."""
    return _make_config(check_file(path))


def _make_config(header: GGUFHeader) -> Any:
    from transformers import AutoConfig

    require_package()
    path = header.path
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    for key, name in CONFIG_NAMES.items():  # that transformers reads for some families only
        value = header.get_setting(key)
        if key == WINDOW_KEY and value is None and header.architecture in DEFAULT_WINDOW:
            continue
        if key == WINDOW_KEY and hasattr(config, name):
            setattr(config, name, value or None)
        elif value is not None:
            setattr(config, name, value)
    head_dim = _get_head_dim(config)
    if (rotated := header.get_setting("rope.dimension_count")) not in (None, head_dim):
        raise GGUFError(f"it rotates {rotated} of {head_dim} channels, which is not read from GGUF")
    if config.num_hidden_layers == LARGE_GEMMA_LAYERS.get(header.architecture):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    if (factor := find_rope_factor(header)) is not None:
        scaling = {"rope_type": "linear", "factor": factor}
        config.rope_parameters[SCALED_LAYER_KIND] = (
            config.rope_parameters[SCALED_LAYER_KIND] | scaling
        )
    if end_tokens := find_end_tokens(header, config.vocab_size):
        config.eos_token_id = end_tokens if len(end_tokens) > 1 else end_tokens[0]
    return config


def _get_head_dim(config: Any) -> int:
    head_dim: int | None = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def count_weight_nbytes(path: Path) -> int:
    """Return the bytes of the weights of a file once they are loaded as they are in it."""
    return sum(_count_nbytes(entry) for entry in check_file(path).tensors.values())


def _count_nbytes(entry: TensorEntry) -> int:
    if len(entry.shape) == 2 and (coded := CODED_TYPES.get(entry.type.name)) is not None:
        codec, shape = Affine(coded.bits, coded.group), torch.Size(entry.shape)
        return CodedMatrix.count_nbytes(shape, codec, with_bias=coded.has_bias)
    return 2 * prod(entry.shape)  # 16 bits, unless other rows are asked for


def load_model(path: Path, dtype: torch.dtype) -> Any:
    """Return the model with rows of `dtype`, its weights packed on the CPU."""
    header = check_file(path)
    config = _make_config(header)
    _check_sizes(header, config)
    model = _make_empty_model(config, dtype)
    filling = _Filling(model, header, dtype)
    with torch.no_grad():
        filling.fill()
    for line in filling.notes():
        log.info(line)
    pack(model)
    model.eval()
    return model


def _check_sizes(header: GGUFHeader, config: Any) -> None:
    """Compare the sizes that the values state with the tensors, before anything is allocated."""
    head_dim = _get_head_dim(config)
    query_rows = config.num_attention_heads * head_dim
    key_rows = config.num_key_value_heads * head_dim
    stated = {
        ("token_embd", 0): config.vocab_size,
        ("token_embd", 1): config.hidden_size,
        ("blk.0.ffn_down", 1): config.intermediate_size,
        ("blk.0.attn_q", 0): query_rows,
        ("blk.0.attn_k", 0): key_rows,
        ("blk.0.attn_qkv", 0): query_rows + 2 * key_rows,
    }
    fused = "blk.0.attn_qkv.weight" in header.tensors
    unused = {"blk.0.attn_q", "blk.0.attn_k"} if fused else {"blk.0.attn_qkv"}
    for (name, axis), size in stated.items():
        if name in unused:
            continue
        if (entry := header.tensors.get(f"{name}.weight")) is None:
            raise GGUFError(f"it has no tensor {name}.weight")
        if len(entry.shape) != 2 or entry.shape[axis] != size:
            raise GGUFError(
                f"tensor {entry.name!r} has shape {entry.shape}, its values state {size}"
            )


def _make_empty_model(config: Any, dtype: torch.dtype) -> Any:
    """Return a model whose parameters are on the meta device, and its buffers on the CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), _meta_parameters():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


@contextmanager
def _meta_parameters() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Filling:
    """Fills the parameters of an empty model with the tensors of a file."""

    def __init__(self, model: nn.Module, header: GGUFHeader, dtype: torch.dtype) -> None:
        self.model, self.header, self.dtype = model, header, dtype
        self.family: Family = FAMILIES[header.architecture]
        self.data = np.memmap(header.path, dtype=np.uint8, mode="r")
        self.decoded = Counter[str]()  # tensors by type that became dense

    def fill(self) -> None:
        """Fill all parameters; raise GGUFError for a tensor that is missing or does not fit."""
        missing = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for entry in self.header.tensors.values():
            if entry.name == ROPE_FACTORS:
                self._divide_frequencies(entry)
                continue
            name = self.family.find_parameter(entry.name)
            try:
                parameter = self.model.get_parameter(name or "")
            except AttributeError:
                known = f"{self.header.architecture} model of {len(missing)} parameters"
                raise GGUFError(f"tensor {entry.name!r} has no place in a {known}") from None
            if entry.shape != tuple(parameter.shape):
                shapes = f"{entry.shape}, and {name} {tuple(parameter.shape)}"
                raise GGUFError(f"tensor {entry.name!r} has shape {shapes}")
            missing.pop(id(parameter), None)
            self._replace(parameter, self._read(entry))
        if missing:
            names = ", ".join(list(missing.values())[:3])
            raise GGUFError(f"it has no tensor for {names}")

    def notes(self) -> Iterator[str]:
        """Say which tensors are no longer as they are in the file."""
        dtype = str(self.dtype).removeprefix("torch.")
        for name, count in self.decoded.items():
            yield f"{format_count(count, 'tensor')} of {name} decoded to {dtype}"

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Put a parameter in the place of another, in each module that has it."""
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is old:
                    module._parameters[name] = new

    def _read(self, entry: TensorEntry) -> Any:
        """Return the parameter of a tensor."""
        order = self._find_row_order(entry)
        if len(entry.shape) == 2 and (coded := CODED_TYPES.get(entry.type.name)) is not None:
            original = nn.Parameter(torch.empty(0, dtype=self.dtype), requires_grad=False)
            return PackedWeight.from_matrix(self._read_codes(entry, coded, order), original)
        dense = self._read_dense(entry)
        if order is not None:
            dense = dense[torch.from_numpy(order)]
        is_layer = len(entry.shape) == 2 and not entry.name.startswith("token_embd")
        if is_layer and dense.dtype in DENSE_DTYPES and explain_unreadable(dense.shape) is None:
            original = nn.Parameter(dense, requires_grad=False)
            return PackedWeight.from_matrix(DenseMatrix(dense), original)
        if len(entry.shape) == 2 and dense.dtype != self.dtype:
            self.decoded[entry.type.name] += 1
        return nn.Parameter(dense.to(self.dtype), requires_grad=False)

    def _read_codes(
        self, entry: TensorEntry, coded: CodedType, order: NDArrayInt | None
    ) -> WeightMatrix:
        num_rows, width = entry.shape
        rows = self._bytes(entry).reshape(num_rows, -1)

        def read(first: int, stop: int) -> Fields:
            chosen = rows[first:stop] if order is None else rows[order[first:stop]]
            groups = coded.split(np.ascontiguousarray(chosen).reshape(-1, entry.type.nbytes))
            if not all(np.isfinite(x).all() for x in (groups.scale, groups.bias) if x is not None):
                raise GGUFError(f"tensor {entry.name!r} has scales or minima that are not finite")
            fields = {"codes": groups.codes, "scale": groups.scale}
            if groups.bias is not None:
                fields["bias"] = groups.bias
            return {
                name: torch.from_numpy(np.ascontiguousarray(values)).view(stop - first, -1)
                for name, values in fields.items()
            }

        codec = Affine(coded.bits, coded.group)
        return CodedMatrix.from_codes(torch.Size((num_rows, width)), self.dtype, codec, read)

    def _read_dense(self, entry: TensorEntry) -> Tensor:
        data = np.array(self._bytes(entry))
        if entry.type.name in DENSE_TYPES:
            values = view_dense(data, entry.type.name).view(entry.shape)
        else:
            values = _decode(data, entry).view(entry.shape)
        is_norm = entry.name.endswith("norm.weight")
        return values - self.family.norm_offset if is_norm and self.family.norm_offset else values

    def _bytes(self, entry: TensorEntry) -> NDArrayBytes:
        return self.data[entry.begin : entry.begin + entry.nbytes]

    def _find_row_order(self, entry: TensorEntry) -> NDArrayInt | None:
        """Return the rows of the file in the order of transformers; None: the same order.

        llama.cpp pairs neighbouring channels of a head, transformers those of its two halves.
        """
        config: Any = self.model.config
        heads = {
            "attn_q.": config.num_attention_heads,
            "attn_k.": config.num_key_value_heads,
        }
        count = next((n for part, n in heads.items() if f".{part}" in entry.name), None)
        if count is None or not self.family.permutes_heads:
            return None
        rows = np.arange(entry.shape[0]).reshape(count, -1, 2)
        return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(-1)

    def _divide_frequencies(self, entry: TensorEntry) -> None:
        """Apply the divisors of the rotary frequencies that a file has (Llama 3)."""
        rotary: Any = self.model.get_submodule("model.rotary_emb")
        divisors = self._read_dense(entry).to(torch.float32)
        if divisors.shape != rotary.inv_freq.shape:
            raise GGUFError(
                f"tensor {entry.name!r} has {len(divisors)} divisors, not {len(rotary.inv_freq)}"
            )
        for name in ("inv_freq", "original_inv_freq"):
            if (frequencies := getattr(rotary, name, None)) is not None:
                setattr(rotary, name, frequencies / divisors)


NDArrayBytes = np.ndarray[Any, np.dtype[np.uint8]]
NDArrayInt = np.ndarray[Any, np.dtype[np.int64]]


def _decode(data: NDArrayBytes, entry: TensorEntry) -> Tensor:
    """Decode a tensor of a type that kernels do not read."""
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError as error:
        raise GGUFError(
            f"tensors of {entry.type.name} need the package gguf: pip install 'kvant[gguf]'"
        ) from error
    kind = GGMLQuantizationType[entry.type.name]
    rows = data.reshape(prod(entry.shape[:-1]), -1)  # decoded a few at a time
    return torch.from_numpy(dequantize(rows, kind))
