"""Adapters that PEFT writes, and the same models with the adapters merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")


def save_adapter(model: Any, folder: Path, seed: int = 0, **config: Any) -> Any:
    """Save a random LoRA adapter of a model; return a copy of the model with it merged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lora = peft.LoraConfig(init_lora_weights=False, **config)
        adapted = peft.get_peft_model(copy.deepcopy(model), lora)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted.merge_and_unload().eval()


def change_config(folder: Path, **fields: Any) -> None:
    """Replace fields of an adapter's configuration."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
