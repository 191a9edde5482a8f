"""The weight of a linear layer as the kernels read it: dense in 16 bits, or as affine codes.

Codes are those of the affine codec for rows, in groups of 32 columns, arranged as pages of keys:
64 outputs are the rows of a page, and up to 256 columns its channels (src/native/kvant.h). So the
kernels that compute scores compute the outputs too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.library import custom_op

from kvant.attention.native.structs import FORMAT_CODES, NATIVE_TILES
from kvant.codecs.affine import Affine
from kvant.codecs.packing import pack_codes
from kvant.contracts import Fields
from kvant.native import (
    DTYPE_CODES,
    WEIGHT_COLUMNS,
    capture_requests,
    get_library,
    multiply_rows,
)
from kvant.native.header import NULL_POINTER, WEIGHT_STRUCT
from kvant.platform.torch_runtime import is_tracing, no_inference_mode

DENSE_DTYPES = (torch.bfloat16, torch.float16)  # of weights that kernels read as they are
BLOCK_OUTPUTS = 64
MAX_PART_COLUMNS = 256
NUM_FITS = 4  # of scales to codes: more than while decoding
SLICE_VALUES = 1 << 18  # encoded or decoded together, which limits the memory
WeightStruct = ctypes.Array[ctypes.c_char]


class WeightMatrix(Protocol):
    """The values of a weight [out, in], which a kernel multiplies."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...
    @property
    def struct(self) -> WeightStruct: ...

    def to_dense(self) -> Tensor:
        """Return the values: the weight itself if it is dense, else a decoded copy."""
        ...

    def take_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of an embedding."""
        ...

    def take_part(self, first: int, stop: int) -> WeightMatrix:
        """Return neighbouring rows as a matrix, which shares the memory."""
        ...


def explain_unreadable(shape: torch.Size) -> str | None:
    """Explain why kernels cannot multiply by a weight of this shape; None if they can."""
    if get_library().functions is None:
        return "without the native library"
    if shape[-1] % WEIGHT_COLUMNS:
        return f"of a width that is no multiple of {WEIGHT_COLUMNS}"
    return None


def can_multiply(x: Tensor, matrix: WeightMatrix, bias: Tensor | None) -> bool:
    """Tell whether the kernels can multiply rows by a weight and add a bias."""
    return (
        x.is_cpu
        and x.dtype in DTYPE_CODES
        and x.ndim > 0
        and x.shape[-1] == matrix.shape[1] > 0
        and matrix.shape[1] % WEIGHT_COLUMNS == 0  # a dense weight may be assigned another width
        and (bias is None or _is_readable_bias(bias, matrix.shape[0]))
        and not is_tracing()
    )


def _is_readable_bias(bias: Tensor, num_outputs: int) -> bool:
    return (
        type(bias) in (Tensor, nn.Parameter)
        and bias.is_cpu
        and bias.dtype in DTYPE_CODES
        and bias.shape == (num_outputs,)
        and bias.is_contiguous()
    )


def multiply(x: Tensor, matrix: WeightMatrix, bias: Tensor | None) -> Tensor:
    """Compute `torch.nn.functional.linear` of rows that `can_multiply` accepts."""
    return multiply_rows(x.contiguous(), matrix.struct, bias, matrix.shape[0])


def take_group(matrix: WeightMatrix, group: int, num_groups: int) -> WeightMatrix:
    """Return the rows of one of several groups of equal size, such as experts."""
    num_outputs = matrix.shape[0] // num_groups
    return matrix.take_part(group * num_outputs, (group + 1) * num_outputs)


def multiply_groups(x: Tensor, offs: Tensor, matrix: WeightMatrix, num_groups: int) -> Tensor:
    """Multiply groups of rows, each by as many outputs of a matrix; `offs` are the groups' ends.

    It is one operator, so a recorded forward reads the groups of every token again.
    """
    _grouped_matrices[id(matrix)] = matrix
    products: Tensor = _multiply_groups_op(x, offs, id(matrix), num_groups)
    return products


_grouped_matrices: WeakValueDictionary[int, WeightMatrix] = WeakValueDictionary()


@custom_op("kvant::multiply_groups", mutates_args=())
def _multiply_groups_op(x: Tensor, offs: Tensor, matrix_id: int, num_groups: int) -> Tensor:
    matrix = _grouped_matrices[matrix_id]
    products = x.new_zeros(len(x), matrix.shape[0] // num_groups)
    first = 0
    with capture_requests(lambda request: None):  # these requests are of this call's groups
        for group, stop in enumerate(offs.tolist()):
            if stop > first:
                part = take_group(matrix, group, num_groups)
                products[first:stop] = multiply(x[first:stop], part, None)
            first = stop
    return products


@dataclass(frozen=True, eq=False)
class DenseMatrix:
    """A weight in 16 bits, at its own address."""

    tensor: Tensor

    @cached_property
    def address(self) -> int:
        """The address when it is first read; later, `share_memory_` may move the storage."""
        return self.tensor.data_ptr()

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def format(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @cached_property
    def struct(self) -> WeightStruct:
        num_outputs, width = self.shape
        codes = self.address, self.tensor.nbytes
        dtype = DTYPE_CODES[self.tensor.dtype]
        return _make_struct(
            (FORMAT_CODES["raw"], 0, 0, dtype, num_outputs, width, 0, *codes, 0, 0, 0, 0)
        )

    def to_dense(self) -> Tensor:
        return self.tensor

    def take_rows(self, rows: Tensor) -> Tensor:
        return self.tensor[rows]

    @cached_property
    def _parts(self) -> dict[tuple[int, int], DenseMatrix]:
        return {}

    def take_part(self, first: int, stop: int) -> DenseMatrix:
        if (part := self._parts.get((first, stop))) is None:
            part = self._parts[first, stop] = DenseMatrix(self.tensor[first:stop])
        return part


@dataclass(frozen=True, eq=False)
class CodedMatrix:
    """A weight as affine codes. Without a bias, codes stand for values around zero."""

    shape: torch.Size
    dtype: torch.dtype  # of decoded values
    codec: Affine
    fields: Fields = field(repr=False)  # [blocks, parts, 64 rows, ...], in tiles

    @classmethod
    def encode(cls, weight: Tensor, codec: Affine) -> CodedMatrix:
        """Encode a dense weight. Its width is a multiple of 32."""
        part = find_part_columns(weight.shape[1])

        def seal(first: int, stop: int) -> Fields:
            rows = weight.detach()[first:stop].to(torch.float32)
            return codec.seal(rows.view(len(rows), -1, part), num_fits=NUM_FITS)

        return cls._arrange(weight.shape, weight.dtype, codec, seal)

    @classmethod
    def from_codes(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        codec: Affine,
        read: Callable[[int, int], Fields],
    ) -> CodedMatrix:
        """Arrange given codes [rows, width], and scales and biases [rows, groups] of them.

        `read` returns the fields of rows from a first one to a last one. Without a bias, codes
        stand for values around zero.
        """
        part = find_part_columns(shape[1])

        def pack(first: int, stop: int) -> Fields:
            fields = {
                name: x.view(len(x), shape[1] // part, -1) for name, x in read(first, stop).items()
            }
            return fields | {"codes": pack_codes(fields["codes"], codec.bits)}

        return cls._arrange(shape, dtype, codec, pack)

    @classmethod
    def _arrange(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        codec: Affine,
        read: Callable[[int, int], Fields],
    ) -> CodedMatrix:
        """Arrange fields [rows, parts, ...], a slice of rows after the other."""
        num_outputs, width = shape
        part, step = find_part_columns(width), _count_slice_rows(width)
        blocks = (-(-num_outputs // BLOCK_OUTPUTS), width // part, BLOCK_OUTPUTS)
        fields: dict[str, Tensor] = {}
        for first in range(0, num_outputs, step):
            for name, rows in read(first, min(first + step, num_outputs)).items():
                if name not in fields:
                    empty = (*blocks, rows.shape[-1])
                    fields[name] = torch.zeros(empty, dtype=rows.dtype, device="cpu")
                rows = nn.functional.pad(rows, (0, 0, 0, 0, 0, -len(rows) % BLOCK_OUTPUTS))
                tiles = rows.view(-1, BLOCK_OUTPUTS, *rows.shape[1:]).transpose(1, 2).contiguous()
                begin = first // BLOCK_OUTPUTS
                into = fields[name][begin : begin + len(tiles)]
                NATIVE_TILES.pack(f"keys.{name}", tiles, into=into)
        return cls(shape, dtype, codec, fields)

    @staticmethod
    def count_nbytes(shape: torch.Size, codec: Affine, *, with_bias: bool = True) -> int:
        """Return the bytes of the codes of a weight of this shape."""
        num_outputs, width = shape
        part = find_part_columns(width)
        fields = codec.fields(part).items()
        used = [field for name, field in fields if with_bias or name != "bias"]
        row_nbytes = (
            width
            // part
            * sum(field.width * (field.dtype or torch.uint8).itemsize for field in used)
        )
        return -(-num_outputs // BLOCK_OUTPUTS) * BLOCK_OUTPUTS * row_nbytes

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.fields.values())

    @property
    def format(self) -> str:
        return f"affine{self.codec.bits}"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.fields.values())

    @cached_property
    def struct(self) -> WeightStruct:
        num_outputs, width = self.shape
        pointers = [(x.data_ptr(), x.nbytes) for x in self.tensors]
        if "bias" not in self.fields:
            pointers.append(NULL_POINTER)
        form = FORMAT_CODES["affine"], self.codec.bits, self.codec.group, 0
        record = (*form, num_outputs, width, find_part_columns(width))
        return _make_struct((*record, *chain.from_iterable(pointers)))

    def to_dense(self) -> Tensor:
        dense = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        step = _count_slice_rows(self.shape[1])
        for first in range(0, self.shape[0], step):
            stop = min(first + step, self.shape[0])
            dense[first:stop] = self.take_rows(torch.arange(first, stop, device="cpu"))
        return dense

    @cached_property
    def _row_markers(self) -> Tensor:
        with no_inference_mode():
            return torch.zeros(1, 1, device="cpu").expand(self.shape[0], 1)

    def take_rows(self, rows: Tensor) -> Tensor:
        """Decode rows; a negative or too large number raises IndexError, as in a dense weight."""
        # Checks the numbers by an operator, so that a forward with this can be recorded.
        nn.functional.embedding(rows, self._row_markers)
        block, lane = rows // BLOCK_OUTPUTS, rows % BLOCK_OUTPUTS
        fields = {}
        for name, values in self.fields.items():
            tiles = values.view(*values.shape[:2], BLOCK_OUTPUTS // 16, -1, 16, _UNIT[name])
            found = tiles[block, :, lane // 16, :, lane % 16]
            fields[name] = found.reshape(*rows.shape, values.shape[1], values.shape[-1])
        if "bias" not in fields:  # a power of two times the scale, which is exact
            fields["bias"] = fields["scale"].float() * -(2 ** (self.codec.bits - 1))
        return self.codec.open(fields).flatten(-2).to(self.dtype)

    @cached_property
    def _parts(self) -> dict[tuple[int, int], CodedMatrix]:
        return {}

    def take_part(self, first: int, stop: int) -> CodedMatrix:
        """Return rows; `first` is a multiple of 64, and so is `stop` unless it is the end."""
        if (part := self._parts.get((first, stop))) is None:
            blocks = slice(first // BLOCK_OUTPUTS, -(-stop // BLOCK_OUTPUTS))
            fields = {name: values[blocks] for name, values in self.fields.items()}
            shape = torch.Size((stop - first, self.shape[1]))
            part = self._parts[first, stop] = CodedMatrix(shape, self.dtype, self.codec, fields)
        return part


_UNIT = {"codes": 4, "scale": 1, "bias": 1}  # neighbouring values of an output in a tile


def find_part_columns(width: int) -> int:
    """Return the largest multiple of 32, at most 256, that divides the width."""
    if width % WEIGHT_COLUMNS:
        raise ValueError(f"a weight of {width} columns: a multiple of {WEIGHT_COLUMNS} is needed")
    return next(n for n in range(MAX_PART_COLUMNS, 0, -WEIGHT_COLUMNS) if width % n == 0)


def _count_slice_rows(width: int) -> int:
    return max(1, SLICE_VALUES // width // BLOCK_OUTPUTS) * BLOCK_OUTPUTS


def _make_struct(numbers: tuple[int, ...]) -> WeightStruct:
    packed = WEIGHT_STRUCT.pack(*numbers)
    return ctypes.create_string_buffer(packed, len(packed))
