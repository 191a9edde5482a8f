"""Load the texts that tools measure models on: prose, code and instructions.

Packages of every environment of `make env` bring them, each more than 40,000 tokens of SmolLM2. The
prose is the language reference of this Python, the code is rich's, and the instructions are
multiple-choice questions with reasoned answers. They change with these packages, so results should
record `compute_digests()`.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

CODE_PACKAGE, INSTRUCTIONS_PACKAGE = "rich", "lm_eval"
INSTRUCTIONS_PATH = "lm_eval/tasks/mmlu/flan_cot_fewshot/_cot_prompts.json"


def load_text(name: str) -> str:
    """Return the text of a name: `prose`, `code` or `instructions`."""
    if name not in TEXTS:
        raise ValueError(f"text {name}: known are {', '.join(TEXTS)}")
    return TEXTS[name]()


def compute_digests() -> dict[str, str]:
    """Hash the texts, by name."""
    return {name: sha256(load_text(name).encode()).hexdigest()[:16] for name in TEXTS}


def _read_prose() -> str:
    return "\n".join(pydoc_data.topics.topics.values())


def _read_code() -> str:
    files = sorted(
        _find_file(CODE_PACKAGE, CODE_PACKAGE).glob("[a-z]*.py")
    )  # the others are mostly tables
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def _read_instructions() -> str:
    file = _find_file(INSTRUCTIONS_PACKAGE, INSTRUCTIONS_PATH)
    prompts: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return "\n\n".join(prompts.values())


def _find_file(package: str, path: str) -> Path:
    """Return a file of an installed package, which is not imported."""
    try:
        return Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError as error:
        raise ValueError(f"{path} is missing: pip install {package}, or make env") from error


TEXTS: dict[str, Callable[[], str]] = {
    "prose": _read_prose,
    "code": _read_code,
    "instructions": _read_instructions,
}
