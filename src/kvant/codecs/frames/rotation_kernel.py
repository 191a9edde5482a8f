"""The Triton kernel for the signed Hadamard transform of hadamard.py, in its operation order.

Launches must disable fused operations, since the product with the signs rounds separately. A
program rotates some rows, one block (a power of two of channels) after the other. Importing this
module imports Triton.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_tokens"])
def rotate(
    x,
    signs,
    out,
    batch_stride,  # strides of x [B, H, T, DIM]
    head_stride,
    row_stride,
    num_rows,  # B * H * T
    num_heads,
    num_tokens,  # T
    DIM: tl.constexpr,
    SIGNS_LAST: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = (n < num_rows)[:, None]
    b, h, t = n // num_tokens // num_heads, n // num_tokens % num_heads, n % num_tokens
    x += b.to(tl.int64) * batch_stride + h.to(tl.int64) * head_stride + t.to(tl.int64) * row_stride
    out += n.to(tl.int64) * DIM
    for bit in tl.static_range(9):
        if DIM >> bit & 1:
            # A block starts after all larger ones.
            _rotate_block(
                x, signs, out, valid, DIM >> bit + 1 << bit + 1, 1 << bit, SIGNS_LAST, ROWS
            )


@triton.jit
def _rotate_block(
    x,
    signs,
    out,
    valid,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    SIGNS_LAST: tl.constexpr,
    ROWS: tl.constexpr,
):
    channel = START + tl.arange(0, SIZE)[None, :]
    sign = tl.load(signs + channel)
    y = tl.load(x[:, None] + channel, mask=valid).to(tl.float32)
    if not SIGNS_LAST:
        y *= sign
    for i in tl.static_range(8):
        if SIZE >> i > 1:
            even, odd = tl.split(tl.reshape(y, [ROWS, SIZE // 2, 2]))
            sums = tl.permute(tl.join(even + odd, even - odd), [0, 2, 1])
            y = tl.reshape(sums, [ROWS, SIZE])
    if SIGNS_LAST:
        y *= sign
    tl.store(out[:, None] + channel, y.to(out.dtype.element_ty), mask=valid)
