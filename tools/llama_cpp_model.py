"""Read tokens by llama.cpp through llama-cpp-python, which compiles for ten minutes
(`pip install llama-cpp-python`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CACHE_TYPES = {"f16": 1, "q8_0": 8, "q5_1": 7, "q4_0": 2}  # by llama.cpp's numbers of types


@lru_cache(maxsize=1)
def import_llama_cpp() -> Any:
    """Import llama.cpp, and silence its log."""
    from llama_cpp import llama_cpp as lib

    lib.silence = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(lib.silence, None)
    return lib


@dataclass(frozen=True)
class LlamaModel:
    """A GGUF file in llama.cpp's memory."""

    lib: Any
    file: Path
    pointer: Any

    @staticmethod
    @contextmanager
    def open(file: Path) -> Iterator[LlamaModel]:
        """Load a file, and free its weights at the end."""
        lib = import_llama_cpp()
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        pointer = lib.llama_model_load_from_file(str(file).encode(), options)
        if not pointer:
            raise RuntimeError(f"llama.cpp could not load {file}")
        try:
            yield LlamaModel(lib, file, pointer)
        finally:
            lib.llama_model_free(pointer)

    @contextmanager
    def open_context(
        self, cache_type: str, context: int, threads: int, *, batch: int, streams: int
    ) -> Iterator[Any]:
        """Make a context of `context` tokens in all streams, and free it at the end."""
        options = make_context_options(self.lib, cache_type, context, threads, batch, streams)
        pointer = self.lib.llama_init_from_model(self.pointer, options)
        if not pointer:
            raise RuntimeError(
                f"llama.cpp has no context of {context} tokens with a {cache_type} cache for "
                f"{self.file}: is there enough memory?"
            )
        try:
            yield pointer
        finally:
            self.lib.llama_free(pointer)

    @contextmanager
    def open_reader(self, cache_type: str, context: int, batch: int) -> Iterator[LlamaReader]:
        """Make a reader of one text of `context` tokens, in chunks of up to `batch`."""
        threads = torch.get_num_threads()
        with self.open_context(cache_type, context, threads, batch=batch, streams=1) as pointer:
            width = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.pointer))
            yield LlamaReader(self.lib, pointer, width)


def make_context_options(
    lib: Any, cache_type: str, context: int, threads: int, batch: int, streams: int
) -> Any:
    options = lib.llama_context_default_params()
    if "flash_attn_type" not in (name for name, *_ in options._fields_):  # set, it had no effect
        raise RuntimeError(
            "this llama-cpp-python is too old, its contexts have no flash_attn_type: "
            "pip install -U llama-cpp-python"
        )
    options.n_ctx = context
    options.n_batch = options.n_ubatch = batch
    options.n_threads = options.n_threads_batch = threads
    options.n_seq_max = streams
    options.type_k = options.type_v = CACHE_TYPES[cache_type]
    options.flash_attn_type = 1  # enabled; a quantized cache needs it
    return options


def decode(
    lib: Any,
    context: Any,
    ids: Sequence[int],
    positions: Sequence[int],
    streams: Sequence[int],
    *,
    every: bool = False,
) -> None:
    """Run a forward of llama.cpp; logits are computed for `every` token, or the last one."""
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, (number, position, stream) in enumerate(zip(ids, positions, streams, strict=True)):
        batch.token[i], batch.pos[i] = number, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
        batch.logits[i] = ctypes.c_int8(every or i == len(ids) - 1).value
    try:
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama.cpp could not compute a batch")
        lib.llama_synchronize(context)
    finally:
        lib.llama_batch_free(batch)


class LlamaReader:
    """A text that llama.cpp reads chunk by chunk, with the logits of every token."""

    def __init__(self, lib: Any, context: Any, width: int) -> None:
        self._lib, self._context, self._width = lib, context, width
        self._length = 0

    def predict(self, ids: Tensor) -> Tensor:
        """Append tokens [1, T]; return their logits [T, vocabulary]."""
        tokens = ids[0].tolist()
        positions = range(self._length, self._length + len(tokens))
        decode(self._lib, self._context, tokens, positions, [0] * len(tokens), every=True)
        self._length += len(tokens)
        pointer = self._lib.llama_get_logits(self._context)
        size = len(tokens) * self._width
        floats = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * size)).contents
        return torch.frombuffer(bytearray(floats), dtype=torch.float32).view(-1, self._width)


def expand_gguf(source: Path, target: Path) -> None:
    """Write a GGUF file with all weights in float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(
                field.name, field.contents(), kind, sub_type=inner[-1] if inner else None
            )
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
