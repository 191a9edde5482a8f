"""Which parity cells read stored pages, and which need dense rows: the expected table.

Fused attention is the rule for every format. Exceptions are listed here with their reason.
"""

from __future__ import annotations

from typing import Literal

from hf.parity import PROMPT, TOKENS, AttentionCounts, Cell, Result
from hf.zoo import FAMILIES, NO_ROWS, OWN_ATTENTION

Reading = Literal["fused", "materialized", "nothing"]

# These split rows after the cache: values in halves, a repeat for each expert, a mask that depends
# on values.
CHANGED_ROWS = ("diffllama", "jetmoe", "doge")
# PyTorch's attention has no softcaps and sinks: stock models multiply explicitly.
EAGER = ("gemma2", "gpt_oss")
# They expand all latents at every step, unless `attach` folds the queries instead.
LATENT = ("minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")

# Models for which transformers builds a mask for chunks even after attach. falcon has its own
# attention, t5 adds numbers to scores, gemma4 lets the tokens of an image see each other.
CHUNK_MASKS = ("falcon", "t5", "gemma4")


def expect_reading(cell: Cell) -> Reading:
    """Return the expected stats of a decode step."""
    if cell.family in NO_ROWS:
        return "nothing"
    dense = cell.family in OWN_ATTENTION + CHANGED_ROWS
    dense |= cell.family in EAGER + LATENT and cell.way == "stock"
    return "materialized" if dense else "fused"


def expect_decoding(cell: Cell, calls: int) -> AttentionCounts:
    """Return the expected stats of all steps after the prompt, with this many attention calls
    in each.
    """
    each = {
        "fused": AttentionCounts(calls, 0, _step_masks(cell, calls)),
        "materialized": AttentionCounts(0, calls, 0),
        "nothing": AttentionCounts(0, 0, 0),
    }[expect_reading(cell)]
    return AttentionCounts(*(number * (TOKENS - PROMPT) for number in each))


def _step_masks(cell: Cell, calls: int) -> int:
    if cell.family == "t5":
        return calls  # a position bias
    if cell.family == "bart" and cell.batch == 2:
        return calls // 2  # the padding of the encoder's rows, which does not grow
    if cell.family == "llama4" and (cell.way == "stock" or cell.batch == 2):
        return 3  # a chunk that transformers describes by a mask only, or that starts in padding
    return 0


def list_problems(cell: Cell, result: Result) -> list[str]:
    """Return the differences between a result and the table."""
    prompt, calls, differences = result.prompt, result.calls, []
    if result.decoding != expect_decoding(cell, calls):
        differences.append(f"decoding: {result.decoding}, not {expect_decoding(cell, calls)}")
    later = len(cell.chunks) - 1  # a first chunk sees its own rows only
    if expect_reading(cell) == "fused" and prompt[:2] != (calls * later, 0):
        differences.append(f"prompt: {prompt}, not {calls * later} fused and nothing else")
    if expect_reading(cell) == "fused" and prompt.masks and not may_use_masks(cell, later):
        differences.append(f"prompt: {prompt}, but nothing asks for a mask")
    return differences


def may_use_masks(cell: Cell, later: int) -> bool:
    """Whether attention over a chunk may use masks of transformers."""
    if cell.family == "llama4" and cell.batch == 2:
        return True  # undeclared padding is stored: chunks are counted from there
    padded = FAMILIES[cell.family].kind == "encoder-decoder" and cell.batch == 2
    return later > 0 and (cell.way == "stock" or cell.family in CHUNK_MASKS or padded)
