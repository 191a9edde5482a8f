"""Models for the command line: the one inside the package, a folder, or a name on the hub."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kvant import demo


def load(name: str | None) -> tuple[Any, Any]:
    """A model and its tokenizer; safetensors only, and no code that comes with a model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as host_logging

    host_logging.disable_progress_bar()
    host_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    where = str(demo.PATH) if name is None else name
    if (
        name is not None
        and name.startswith((".", "/", "~"))
        and not Path(name).expanduser().is_dir()
    ):
        raise ValueError(f"--model {name}: there is no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        model = AutoModelForCausalLM.from_pretrained(where, dtype="auto", use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--model {where} cannot be loaded: {reason}") from error
    return model.eval(), tokenizer
