"""Load a model by name: the one inside the package, a folder, or a name on the hub."""

from __future__ import annotations

import json
import logging
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from kvant.checkpoints.files import (
    CONFIG_NAME,
    GGUF_SUFFIX,
    check_checkpoint,
    check_gguf_weights,
    find_gguf,
    resolve_checkpoint,
)
from kvant.checkpoints.hub import report_gguf_errors, report_loading_errors
from kvant.platform.devices import AUTO_DTYPE, parse_device, parse_dtype
from kvant.platform.paths import expand_path
from kvant.recipes import RAW_WEIGHTS, WeightFormats

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kvant")


class LoadOptions(TypedDict, total=False):
    """How a checkpoint is loaded."""

    flag: str  # of the command line, named by errors
    trust_code: bool  # run code of the checkpoint
    device: str | None  # default: a GPU if there is one
    dtype: str  # `auto` is that of the checkpoint
    weights: WeightFormats | None  # formats for `kvant.pack`; default: not packed


def load(name: str | None, **options: Unpack[LoadOptions]) -> tuple[Any, Any]:
    """Load a model and its tokenizer; None: those of the package.

    `name` is a folder or a name on the hub with safetensors, a GGUF file, or "smollm2". Quantized
    weights of a GGUF file stay quantized.
    """
    return _load(name, tokenizer=True, **options)


def load_model(name: str | None, **options: Unpack[LoadOptions]) -> Any:
    """Load a model without its tokenizer."""
    model, _ = _load(name, tokenizer=False, **options)
    return model


def _load(
    name: str | None,
    *,
    tokenizer: bool,
    flag: str = "--model",
    trust_code: bool = False,
    device: str | None = None,
    dtype: str = AUTO_DTYPE,
    weights: WeightFormats | None = None,
) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    torch_device, torch_dtype = parse_device(device), parse_dtype(dtype)
    if (file := find_gguf(name, flag)) is not None:
        return _load_gguf(file, torch_device, torch_dtype, weights, tokenizer=tokenizer, flag=flag)
    if weights not in (None, RAW_WEIGHTS) and torch_device.type != "cpu":
        raise ValueError(
            f"--weights {weights}: rounded weights are multiplied on a CPU, not on {torch_device}: "
            "add --device cpu, or drop --weights"
        )
    check_checkpoint(name, flag=flag, tokenizer=tokenizer)
    checkpoint = resolve_checkpoint(name, flag)
    with report_loading_errors(checkpoint, flag) as hub_options:
        options = {**hub_options, "trust_remote_code": trust_code}
        config = AutoConfig.from_pretrained(checkpoint, **options)
        model, info = _choose_model_class(config).from_pretrained(
            checkpoint,
            dtype=torch_dtype,
            use_safetensors=True,
            output_loading_info=True,
            adapter_kwargs=hub_options,  # with PEFT, transformers looks for an adapter first
            **options,
        )
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"it has no weights for {', '.join(missing[:3])}")
        loaded = AutoTokenizer.from_pretrained(checkpoint, **options) if tokenizer else None
    model = model.eval().to(torch_device)
    if weights is not None:
        from kvant.weights.packing import pack

        packing = pack(model, weights)
        log.info("%s", packing)
        if weights != RAW_WEIGHTS and not packing.has_rounded_layers:
            raise ValueError(f"--weights {weights}: no layer can be rounded: {packing}")
    return model, loaded


def _choose_model_class(config: Any) -> Any:
    """Return transformers' class for a model that continues text, with images if it reads them."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    if reads_images and type(config) not in AutoModelForCausalLM._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_processor(
    name: str | None, model: Any, tokenizer: Any, *, flag: str = "--model", trust_code: bool = False
) -> Any:
    """Return the processor of a loaded checkpoint if it reads images, else its tokenizer.

    If the processor cannot be loaded, a warning says why; the model reads text alone then.
    """
    from transformers import AutoProcessor

    from kvant.vision import VISION_FAMILIES

    if find_gguf(name, flag) is not None or model.config.model_type not in VISION_FAMILIES:
        return tokenizer
    checkpoint = resolve_checkpoint(name, flag)
    try:
        with report_loading_errors(checkpoint, flag) as hub_options:
            return AutoProcessor.from_pretrained(
                checkpoint, trust_remote_code=trust_code, **hub_options
            )
    except ValueError as error:
        log.warning("images are refused, since their processor is missing: %s", error)
        log.warning("it may need: pip install 'kvant[vision]'")
        return tokenizer


def _load_gguf(
    file: Path,
    device: torch.device,
    dtype: torch.dtype | str,
    weights: WeightFormats | None,
    *,
    tokenizer: bool,
    flag: str,
) -> tuple[Any, Any]:
    """Load a GGUF file, whose weights stay as they are; rows are bfloat16 by default."""
    check_gguf_weights(file, weights)
    if device.type != "cpu":
        raise ValueError(
            f"{flag} {file}: weights of GGUF files are multiplied on a CPU, not on {device}: add "
            "--device cpu"
        )
    import torch

    from kvant.gguf.load import load_model
    from kvant.gguf.tokenizer import load_tokenizer

    with report_gguf_errors(file, flag):
        rows = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
        loaded_tokenizer = load_tokenizer(file) if tokenizer else None  # fails sooner
        return load_model(file, rows), loaded_tokenizer


def load_config(name: str | None) -> Any:
    """Load the configuration of a model, without its weights."""
    if (file := find_gguf(name)) is not None:
        from kvant.gguf.load import load_config as load_gguf_config

        with report_gguf_errors(file, "--model"):
            return load_gguf_config(file)
    from transformers import AutoConfig

    checkpoint = resolve_checkpoint(name, "--model")
    with report_loading_errors(checkpoint, "--model") as options:
        return AutoConfig.from_pretrained(checkpoint, **options)


def read_config(path: str | PathLike[str]) -> Any:
    """Read a config.json, that of a folder, or that of a GGUF file or a name on the hub."""
    local = expand_path(path)
    if local.suffix == GGUF_SUFFIX:
        return load_config(str(path))
    file = local / CONFIG_NAME if local.is_dir() else local
    if isinstance(path, str) and not local.exists() and local.suffix != ".json":
        return load_config(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: a JSON object is needed, as in {CONFIG_NAME}")
    return config


def make_meta_model(config: Any) -> Any:
    """Make the modules of a model on the meta device, without memory for weights."""
    import torch
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    autos = AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModel
    for auto in autos:
        if type(config) in auto._model_mapping:
            with torch.device("meta"):
                return auto.from_config(config).eval()
    raise ValueError(f"--model: transformers has no model for {type(config).__name__}")
