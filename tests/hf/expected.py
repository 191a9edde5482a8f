"""Which cells read the stored pages, and which need dense rows: the table that tests hold kvant to.

Fused is the rule, whatever the format. What is not stands here, with the reason.
"""

from __future__ import annotations

from typing import Literal

from hf.parity import PROMPT, TOKENS, Cell, Reads, Result
from hf.zoo import FAMILIES, NO_ROWS, OWN_ATTENTION

Reading = Literal["fused", "materialized", "nothing"]

# These take rows apart after the cache: values in halves, a repeat for each expert, a mask that
# depends on values.
CHANGED_ROWS = ("diffllama", "jetmoe", "doge")
# Softcaps and sinks have no place in PyTorch's attention: stock models multiply by hand.
EAGER = ("gemma2", "gpt_oss")
# They unfold all latents at every step, unless `attach` folds the queries instead.
LATENT = ("minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")

# A mask that the host makes for a chunk even of an attached model: falcon has its own attention, t5
# adds numbers to scores, gemma4 lets the tokens of an image see each other.
CHUNK_MASKS = ("falcon", "t5", "gemma4")


def reading(cell: Cell) -> Reading:
    """What decoding does."""
    if cell.family in NO_ROWS:
        return "nothing"
    dense = cell.family in OWN_ATTENTION + CHANGED_ROWS
    dense |= cell.family in EAGER + LATENT and cell.way == "stock"
    return "materialized" if dense else "fused"


def decoding(cell: Cell, calls: int) -> Reads:
    """What all steps that follow the prompt add up to, with so many attention calls in each."""
    each = {
        "fused": Reads(calls, 0, _step_masks(cell, calls)),
        "materialized": Reads(0, calls, 0),
        "nothing": Reads(0, 0, 0),
    }[reading(cell)]
    return Reads(*(number * (TOKENS - PROMPT) for number in each))


def _step_masks(cell: Cell, calls: int) -> int:
    if cell.family == "t5":
        return calls  # a bias on positions
    if cell.family == "bart" and cell.batch == 2:
        return calls // 2  # the padding of the encoder's rows, which does not grow
    if cell.family == "llama4" and (cell.way == "stock" or cell.batch == 2):
        return 3  # a chunk, which the host knows as a mask only, or which begins in padding
    return 0


def problems(cell: Cell, result: Result) -> list[str]:
    """What a result has against the table."""
    prompt, calls, found = result.prompt, result.calls, []
    if result.decoding != decoding(cell, calls):
        found.append(f"decoding: {result.decoding}, not {decoding(cell, calls)}")
    later = len(cell.chunks) - 1  # a first chunk sees nothing but its own rows
    if reading(cell) == "fused" and prompt[:2] != (calls * later, 0):
        found.append(f"prompt: {prompt}, not {calls * later} fused and nothing else")
    if reading(cell) == "fused" and prompt.masks and not masked(cell, later):
        found.append(f"prompt: {prompt}, but nothing asks for a mask")
    return found


def masked(cell: Cell, later: int) -> bool:
    """May attention over a chunk take masks of the host's?"""
    if cell.family == "llama4" and cell.batch == 2:
        return True  # padding that nobody told is stored: chunks are counted from there
    padded = FAMILIES[cell.family].kind == "encoder-decoder" and cell.batch == 2
    return later > 0 and (cell.way == "stock" or cell.family in CHUNK_MASKS or padded)
