"""A kernel that only sums: what Triton's sealing sums, without what comes before and after."""

import triton
import triton.language as tl

from kvant.attention.triton.kernels.store import compute_leaf_channels, tree_sum


@triton.jit
def sums(
    x,
    out,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
):
    channel, there = compute_leaf_channels(GROUP, COUNT, GROUPS, DIM)
    total = tree_sum(tl.load(x + channel, mask=there, other=0.0))
    group = tl.arange(0, COUNT)[:, None]
    tl.store(out + group, total, mask=group < GROUPS)
