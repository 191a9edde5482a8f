"""The signed Hadamard transform of hadamard.py as a kernel, in its order of operations.

Nothing may be fused (whoever launches says so): the product with the signs rounds on its own. A
program turns some rows, block by block of the powers of two that a row is made of. This is
Triton's language, Python in syntax alone: it is imported only where it is run.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "heads", "count"])
def rotate(
    x,
    signs,
    out,
    batch,  # strides of x [B, H, T, DIM]
    head,
    row,
    rows,  # that there are: B * H * T
    heads,
    count,  # T
    DIM: tl.constexpr,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (n < rows)[:, None]
    b, h, t = n // count // heads, n // count % heads, n % count
    x += b.to(tl.int64) * batch + h.to(tl.int64) * head + t.to(tl.int64) * row
    out += n.to(tl.int64) * DIM
    for bit in tl.static_range(9):
        if DIM >> bit & 1:
            # Larger blocks lie before this one.
            _block(x, signs, out, there, DIM >> bit + 1 << bit + 1, 1 << bit, LAST, ROWS)


@triton.jit
def _block(
    x,
    signs,
    out,
    there,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
):
    channel = START + tl.arange(0, SIZE)[None, :]
    sign = tl.load(signs + channel)
    y = tl.load(x[:, None] + channel, mask=there).to(tl.float32)
    if not LAST:
        y *= sign
    for i in tl.static_range(8):
        if SIZE >> i > 1:
            even, odd = tl.split(tl.reshape(y, [ROWS, SIZE // 2, 2]))
            both = tl.permute(tl.join(even + odd, even - odd), [0, 2, 1])
            y = tl.reshape(both, [ROWS, SIZE])
    if LAST:
        y *= sign
    tl.store(out[:, None] + channel, y.to(out.dtype.element_ty), mask=there)
