"""The scale and bias of affine groups: the pair that covers, or the least squares fit to its codes.

Groups lie as [rows, groups, values]; what is found of each is [rows, groups, 1]. All of it is as in
codecs/affine.py, to the bit, where nothing is fused.
"""

import triton
import triton.language as tl

from kvant.attention.triton.kernels.float16 import half_below, nearest_half
from kvant.attention.triton.kernels.sums import tree_sum

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it leaves the nearest integer


@triton.jit
def covering(row, there, MOST: tl.constexpr):
    """The scale and the bias that cover each group."""
    low = tl.min(tl.where(there, row, float("inf")), 2, keep_dims=True)
    high = tl.max(tl.where(there, row, float("-inf")), 2, keep_dims=True)
    bias = half_below(low + 0.0)  # of two zeros the positive one
    most = tl.full(low.shape, MOST, tl.float32)
    return -half_below(-tl.div_rn(high + 0.0 - bias.to(tl.float32), most)), bias


@triton.jit
def nearest_codes(row, scale, bias, MOST: tl.constexpr):
    step = scale.to(tl.float32)
    step = tl.where(step > 0, step, 1.0)
    codes = tl.div_rn(row - bias.to(tl.float32), tl.broadcast_to(step, row.shape))
    return tl.minimum(tl.maximum(codes + ROUND - ROUND, 0.0), MOST)


@triton.jit
def fitted(row, codes, n, scale, bias):
    """The least squares scale and bias, or the given ones where these lose no more."""
    # Sums of codes are exact in any order, below 2^24; and so are products of a code and a value.
    total = tl.sum(codes, 2, keep_dims=True).to(tl.float64)
    n = tl.maximum(n, 1).to(tl.float64)
    spread = n * tl.sum(codes * codes, 2, keep_dims=True).to(tl.float64) - total * total
    level = _group_sum(row.to(tl.float64))
    overlap = _group_sum(codes.to(tl.float64) * row.to(tl.float64))
    slope = (n * overlap - total * level) / tl.where(spread > 0, spread, 1.0)
    fit = nearest_half(slope)
    base = nearest_half((level - fit.to(tl.float64) * total) / n)
    before = _excess(scale, bias, slope, spread, total, n, level)
    after = _excess(fit, base, slope, spread, total, n, level)
    # Codes that are all the same have no fit.
    better = (spread > 0) & (fit > 0) & (after < before)
    return tl.where(better, fit, scale), tl.where(better, base, bias)


@triton.jit
def _excess(scale, bias, slope, spread, total, n, level):
    """n times the squared error, beyond that of the fit before it is rounded."""
    scale, bias = scale.to(tl.float64), bias.to(tl.float64)
    off, rest = scale - slope, scale * total + n * bias - level
    return off * off * spread + rest * rest


@triton.jit
def _group_sum(x):
    total = tree_sum(tl.reshape(x, [x.shape[0] * x.shape[1], x.shape[2]]))
    return tl.reshape(total, [x.shape[0], x.shape[1], 1])
