"""The blocks of GGUF tensors as codes with a scale and a bias, or as dense values.

    type    a group of      value of code c                        the file's numbers
    Q4_0    32              (c - 8) d                              exact
    Q4_1    32              c d + m                                exact
    Q5_0    32              (c - 16) d                             exact
    Q5_1    32              c d + m                                exact
    Q8_0    32              (c - 128) d, of signed bytes           exact
    Q4_K    32              c (d s) - (e m), of 6-bit s and m      d s and e m rounded to float16
    Q5_K    32              the same                               the same
    Q6_K    16              (c - 32) (d s), of 8-bit s             d s rounded to float16

d, m and e are float16. Rounding to float16 moves a scale by at most 1 / 2048 of it, or 3e-8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[Any]  # uint8 [blocks, bytes]


class Groups(NamedTuple):
    """Codes [blocks, values], and scales and biases [blocks, groups]; None: around zero."""

    codes: Bytes
    scale: NDArray[np.float16]
    bias: NDArray[np.float16] | None


class CodedType(NamedTuple):
    """A tensor type whose blocks are affine groups."""

    bits: int
    group: int
    has_bias: bool
    split: Callable[[Bytes], Groups]


def _halves(blocks: Bytes, at: int, count: int = 1) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, at : at + 2 * count]).view("<f2").astype(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """Return the low halves of bytes, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Bytes) -> Bytes:
    """Return the bits of bytes, the lowest of each first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _split_q4_0(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]), _halves(blocks, 0), None)


def _split_q4_1(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _split_q5_0(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, _halves(blocks, 0), None)


def _split_q5_1(blocks: Bytes) -> Groups:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return Groups(codes, _halves(blocks, 0), _halves(blocks, 2))


def _split_q8_0(blocks: Bytes) -> Groups:
    return Groups(blocks[:, 2:] ^ 128, _halves(blocks, 0), None)


def _split_k_scales(blocks: Bytes) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Return the scales and biases of 8 groups.

    Of 12 bytes, the first four have the scales of groups 0 to 3 in their low 6 bits, the next four
    their minima. The last four have the low 4 bits of scales and minima of groups 4 to 7; the high
    2 bits are those of the first eight.
    """
    packed = blocks[:, 4:16]
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    s = np.concatenate([scales & 63, rest & 15 | scales >> 6 << 4], axis=-1).astype(np.float32)
    m = np.concatenate([minima & 63, rest >> 4 | minima >> 6 << 4], axis=-1).astype(np.float32)
    d, e = (_halves(blocks, at).astype(np.float32) for at in (0, 2))
    with np.errstate(over="ignore"):
        return (d * s).astype(np.float16), (-e * m).astype(np.float16)


def _split_q4_k(blocks: Bytes) -> Groups:
    scale, bias = _split_k_scales(blocks)
    return Groups(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256), scale, bias)


def _split_q5_k(blocks: Bytes) -> Groups:
    scale, bias = _split_k_scales(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return Groups((low | high << 4).reshape(-1, 256), scale, bias)


def _split_q6_k(blocks: Bytes) -> Groups:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    s = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    d = _halves(blocks, 208).astype(np.float32)
    with np.errstate(over="ignore"):
        scale = (d * s).astype(np.float16)
    return Groups((low | high << 4).reshape(-1, 256), scale, None)


CODED_TYPES = {
    "Q4_0": CodedType(4, 32, False, _split_q4_0),
    "Q4_1": CodedType(4, 32, True, _split_q4_1),
    "Q5_0": CodedType(5, 32, False, _split_q5_0),
    "Q5_1": CodedType(5, 32, True, _split_q5_1),
    "Q8_0": CodedType(8, 32, False, _split_q8_0),
    "Q4_K": CodedType(4, 32, True, _split_q4_k),
    "Q5_K": CodedType(5, 32, True, _split_q5_k),
    "Q6_K": CodedType(6, 16, False, _split_q6_k),
}
DENSE_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def view_dense(data: Bytes, type_name: str) -> Tensor:
    """Return the values of a dense tensor, on the memory of `data` [bytes]."""
    return torch.from_numpy(data).view(DENSE_TYPES[type_name])
