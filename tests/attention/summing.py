"""A kernel with only the sums of Triton's sealing, without the code before and after them."""

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
    channel, in_range = compute_leaf_channels(GROUP, COUNT, GROUPS, DIM)
    total = tree_sum(tl.load(x + channel, mask=in_range, other=0.0))
    group = tl.arange(0, COUNT)[:, None]
    tl.store(out + group, total, mask=group < GROUPS)
