"""The tokens of a prompt, in whatever form it comes: text, token ids, or messages with roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvant.errors import PromptError
from kvant.generation.dialogue import templated

Message = Mapping[str, Any]  # role and content, and whatever else a template knows
ONE = (
    "one prompt at a time is generated; of several, "
    "[list(kvant.generate(model, tokenizer, one)) for one in prompts]"
)
Prompt = str | Sequence[int] | Tensor | Sequence[Message]


def tokens_of_prompt(tokenizer: Any, prompt: Prompt) -> str | list[int]:
    """Text as it is; of ids [T] or [1, T] the numbers; of messages what the template makes."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        raise PromptError("a mapping is no prompt: of a tokenizer's output give ['input_ids']")
    parts: Any = prompt if isinstance(prompt, list | tuple) else [prompt]
    if parts and all(isinstance(part, Mapping) for part in parts):
        return templated(tokenizer, parts)
    if any(isinstance(part, str) or (len(parts) > 1 and _many(part)) for part in parts):
        raise PromptError(ONE)
    return _ids(prompt)


def _many(part: Any) -> bool:
    return isinstance(part, list | tuple) or (isinstance(part, Tensor) and part.ndim > 0)


def _ids(prompt: Any) -> list[int]:
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(
            f"{type(prompt).__name__} is no prompt: text, token ids or messages are needed: {error}"
        ) from None
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise PromptError(f"a prompt of {ids.dtype}: token ids are whole numbers")
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise PromptError(ONE if ids.ndim == 2 else f"token ids {list(ids.shape)}: [T] or [1, T]")
    return [int(token) for token in ids.tolist()]
