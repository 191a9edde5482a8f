"""The adapter_config.json of a LoRA adapter, as PEFT writes it.

Fields that change nothing after the training are ignored. Any other field must be empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from kvant.adapters.patterns import match_patterns
from kvant.errors import AdapterError
from kvant.spec.headers import refuse_constant, reject_duplicate_keys

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1 << 16
SUPPORTED = (
    "LoRA of linear layers, with r, lora_alpha, use_rslora, rank_pattern, alpha_pattern and "
    "target_modules"
)
USED_FIELDS = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
USED_FIELDS |= {"target_modules", "init_lora_weights"}
# Metadata, training options, and `fan_in_fan_out`: as in PEFT, the class of a layer decides it.
IGNORED_FIELDS = {"auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode"}
IGNORED_FIELDS |= {"lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision"}
IGNORED_FIELDS |= {"eva_config", "runtime_config", "task_type"}
EMPTY_VALUES: tuple[Any, ...] = (None, False, "none", [], {})
# Other ways to initialize (pissa, olora, loftq) also change the weights of the model.
PLAIN_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraConfig:
    """The ranks, the scales and the layers of an adapter."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]  # by regular expression of the end of a layer's name
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]  # a regular expression, or the ends of names

    def find_targets(self, names: Sequence[str]) -> set[str]:
        """Return the names of layers that the adapter changes."""
        if isinstance(self.target_modules, str):
            return match_patterns([self.target_modules], names)[self.target_modules]
        ends = tuple(f".{target}" for target in self.target_modules)
        return {name for name in names if name in self.target_modules or name.endswith(ends)}

    def find_ranks(self, names: Sequence[str]) -> dict[str, int]:
        """Return the rank of each layer."""
        return _apply_pattern(self.rank_pattern, self.rank, names)

    def find_scales(self, ranks: Mapping[str, int]) -> dict[str, float]:
        """Return the factor of the product of each layer, given the ranks of layers."""
        alphas = _apply_pattern(self.alpha_pattern, self.alpha, list(ranks))
        return {
            name: alphas[name] / (math.sqrt(rank) if self.use_rslora else rank)
            for name, rank in ranks.items()
        }


def _apply_pattern(
    pattern: Mapping[str, Any], default: Any, names: Sequence[str]
) -> dict[str, Any]:
    """Return the value of the first key that matches the end of each name, else the default."""
    regexes = {rf"(.*\.)?({key})": value for key, value in pattern.items()}
    matches = match_patterns(list(regexes), names)
    return {
        name: next((value for regex, value in regexes.items() if name in matches[regex]), default)
        for name in names
    }


def read_config(folder: Path) -> LoraConfig:
    """Read and check the configuration of an adapter; raise AdapterError naming what is wrong."""
    file = folder / CONFIG_NAME
    try:
        if (size := file.stat().st_size) > MAX_CONFIG_BYTES:
            raise ValueError(f"it has {size} bytes: at most {MAX_CONFIG_BYTES} are read")
        if not file.is_file():
            raise ValueError("it is no regular file")
        fields = json.loads(
            file.read_text(encoding="utf-8"),
            object_pairs_hook=reject_duplicate_keys,
            parse_constant=refuse_constant,
        )
        if not isinstance(fields, dict):
            raise ValueError("it is no JSON object")
        return _parse_config(fields)
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise AdapterError(f"{file}: {error}") from error


def _parse_config(fields: Mapping[str, Any]) -> LoraConfig:
    if (peft_type := fields.get("peft_type")) != "LORA":
        raise ValueError(f"peft_type={short(peft_type)}: supported is {SUPPORTED}")
    for name in sorted(fields.keys() - USED_FIELDS - IGNORED_FIELDS):
        if fields[name] not in EMPTY_VALUES:
            raise ValueError(f"{short(name)}={short(fields[name])}: supported is {SUPPORTED}")
    initialization = fields.get("init_lora_weights", True)
    if initialization not in PLAIN_INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights={short(initialization)} also changes the weights of the model: "
            "convert the adapter to plain LoRA (save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    use_rslora = fields.get("use_rslora", False)
    if not isinstance(use_rslora, bool):
        raise ValueError(f"use_rslora={short(use_rslora)}: true or false is needed")
    return LoraConfig(
        _check_rank("r", fields.get("r")),
        _check_alpha("lora_alpha", fields.get("lora_alpha")),
        use_rslora,
        _parse_pattern("rank_pattern", fields, _check_rank),
        _parse_pattern("alpha_pattern", fields, _check_alpha),
        _parse_targets(fields.get("target_modules")),
    )


def _check_rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ValueError(f"{name}={short(value)}: a whole number from 1 to {MAX_RANK} is needed")
    return value


def _check_alpha(name: str, value: Any) -> float:
    try:
        alpha = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        alpha = math.inf
    if not math.isfinite(alpha):
        raise ValueError(f"{name}={short(value)}: a finite number is needed")
    return alpha


def _parse_pattern(
    name: str, fields: Mapping[str, Any], check: Callable[[str, Any], Any]
) -> Mapping[str, Any]:
    pattern = fields.get(name) or {}
    if not isinstance(pattern, dict):
        raise ValueError(f"{name}={short(pattern)}: an object is needed")
    return {key: check(f"{name}[{short(key)}]", value) for key, value in pattern.items()}


def _parse_targets(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise ValueError(f"target_modules={short(value)}: names or a regular expression are needed")
