"""Load a model, its tokenizer and its configuration by name, and say how its files pool texts.

name ──files.find_gguf──► GGUF file ──────┐
     ──files.resolve_checkpoint──► folder ┴─loader.load──► model, tokenizer
     ──files.find_pooling──► Pooling
"""

from kvant.checkpoints.files import (
    check_checkpoint,
    check_gguf_weights,
    find_config_file,
    find_gguf,
    find_pooling,
)
from kvant.checkpoints.loader import (
    LoadOptions,
    load,
    load_config,
    load_model,
    load_processor,
    make_meta_model,
    read_config,
)
from kvant.checkpoints.pooling import DeclaredPooling, Pooling, PoolingError

__all__ = [
    "DeclaredPooling",
    "LoadOptions",
    "Pooling",
    "PoolingError",
    "check_checkpoint",
    "check_gguf_weights",
    "find_config_file",
    "find_gguf",
    "find_pooling",
    "load",
    "load_config",
    "load_model",
    "load_processor",
    "make_meta_model",
    "read_config",
]
