"""Sums in the order of codecs/sums.py: the upper half is added to the lower one, and so on."""

import triton
import triton.language as tl


@triton.jit
def leaves(GROUP: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr):
    """[COUNT, GROUP]: the channel of each leaf of the trees of `GROUPS` groups, and is there one?

    The tree of a shorter group is a part of that of a whole one: what it lacks counts as zeros.
    """
    group, leaf = tl.arange(0, COUNT)[:, None], tl.arange(0, GROUP)[None, :]
    if GROUP * GROUPS == DIM:
        channel = group * GROUP + leaf
        there = channel < DIM
    else:
        width = tl.minimum(tl.maximum(DIM - group * GROUP, 0), GROUP)
        place, there = leaf * 0, leaf < GROUP
        for i in tl.static_range(8):
            if GROUP >> i > 1:
                # A bit says in which half the leaf is; of an odd width the lower one is larger.
                place = place + (leaf >> i & 1) * (((width << i) + GROUP - 1) // GROUP)
                there = there & (place < ((width << i + 1) + GROUP - 1) // GROUP)
        channel = group * GROUP + place
    return channel, there


@triton.jit
def tree_sum(x):
    """[N, leaves] -> [N, 1]."""
    width: tl.constexpr = x.shape[1]
    for half in tl.static_range(1, 9):
        if width >> half > 0:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, width >> half]), 1)
    return x
