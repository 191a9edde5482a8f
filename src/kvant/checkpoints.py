"""Models by name: the one inside the package, a folder, or a name on the hub."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvant import demo


def load(name: str | None, *, flag: str = "--model", trust_code: bool = False) -> tuple[Any, Any]:
    """A model and its tokenizer: safetensors only, and none of its own code unless asked."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = _where(name, flag)
    with _loading(where, flag):
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_code)
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype="auto", use_safetensors=True, trust_remote_code=trust_code
        )
    return model.eval(), tokenizer


def configuration(name: str | None) -> Any:
    """What a model says of itself, without its weights."""
    from transformers import AutoConfig

    where = _where(name, "--model")
    with _loading(where, "--model"):
        return AutoConfig.from_pretrained(where)


def _where(name: str | None, flag: str) -> str:
    if name is None:
        return str(demo.PATH)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    if name.startswith((".", "/", "~")):
        raise ValueError(f"{flag} {name}: there is no such folder")
    return name


@contextmanager
def _loading(where: str, flag: str) -> Iterator[None]:
    """Quiet, and in one line where it fails."""
    from transformers.utils import logging as host_logging

    host_logging.disable_progress_bar()
    host_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:  # a broken checkpoint makes its readers raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{flag} {where} cannot be loaded: {reason}") from error


def skeleton(config: Any) -> Any:
    """The modules of a model, without memory for their weights."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModel):
        if type(config) in auto._model_mapping:
            with torch.device("meta"):
                return auto.from_config(config).eval()
    raise ValueError(f"--model: transformers has no model for {type(config).__name__}")
