"""How many bytes the state of a recurrent layer takes: the same at every length.

A convolution keeps its last columns in the dtype of the model, a recurrence its state in float32.
Checkpoints, which are copies to come back to, are not known here.
"""

from __future__ import annotations

from kvant.configurations.entries import Entries
from kvant.shapes import CONV

WIDE = 4  # bytes of float32

# What families call the heads of a selective state space, the channels of a head, the groups that
# share a projection, the width of the state and that of the convolution.
SECOND = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
    ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
)
# The first kind has no heads: how much wider than the model, state, convolution.
FIRST = (
    ("mamba_expand", "mamba_d_state", "mamba_d_conv"),
    ("expand", "state_size", "conv_kernel"),
)
MIXED = ("num_attention_heads", "num_key_value_heads", "head_dim", "cca_time0", "cca_time1")
DELTA = (  # a gated delta net: heads and channels of keys and values, convolution
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def state_nbytes(entries: Entries, kind: str, itemsize: int) -> int | None:
    """Bytes of one layer and one sequence, or None where the configuration does not tell."""
    if kind == CONV:
        told = entries.numbers(("hidden_size", "conv_L_cache"))
        return None if told is None else told[0] * told[1] * itemsize
    own = _mixed(entries, itemsize) or _delta(entries, itemsize)
    return own or _second(entries, itemsize) or _first(entries, itemsize)


def _mixed(entries: Entries, itemsize: int) -> int | None:
    """Zaya: two convolutions over queries and keys, and half of the values of one token."""
    told = entries.numbers(MIXED)
    if told is None:
        return None
    heads, kv_heads, dim, first, second = told
    columns = (heads + kv_heads) * dim * (first + second - 2)
    return (columns + kv_heads * dim // 2) * itemsize


def _delta(entries: Entries, itemsize: int) -> int | None:
    told = entries.numbers(DELTA)
    if told is None:
        return None
    key_heads, key_dim, value_heads, value_dim, kernel = told
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return channels * kernel * itemsize + value_heads * key_dim * value_dim * WIDE


def _second(entries: Entries, itemsize: int) -> int | None:
    told = entries.numbers(*SECOND) or _divided(entries)
    if told is None:
        return None
    heads, dim, groups, width, kernel = told
    channels = heads * dim + 2 * groups * width
    return channels * kernel * itemsize + heads * dim * width * WIDE


def _divided(entries: Entries) -> tuple[int, ...] | None:
    """Where the channels of a head are left to be what the heads divide."""
    heads, _, *others = SECOND[0]
    told = entries.numbers((heads, "hidden_size", "mamba_expand", *others))
    if told is None:
        return None
    count, hidden, expand, *rest = told
    return (count, hidden * expand // count, *rest)


def _first(entries: Entries, itemsize: int) -> int | None:
    told, hidden = entries.numbers(*FIRST), entries.number("hidden_size")
    if told is None or hidden is None:
        return None
    expand, width, kernel = told
    return expand * hidden * (kernel * itemsize + width * WIDE)
