"""Decode steps on the GPU: two operators that a CUDA graph captures."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvant.attention.triton import TritonBackend
from kvant.attention.triton.arguments import StaticTritonPageTable
from kvant.attention.triton.token_operators import attend_token, write_token
from kvant.contracts import AttentionRequest, View
from kvant.replay.steps import DecodeStep, check_step_view


@dataclass(eq=False)
class TritonDecodeStep(DecodeStep):
    """The decode step of a layer on a GPU, or in Triton's interpreter."""

    page_table: StaticTritonPageTable

    @classmethod
    def from_view(cls, view: View, page_table: StaticTritonPageTable) -> TritonDecodeStep:
        """Make a step from a layer's view of the expected token."""
        device = view.keys.open.device.type
        backend = TritonBackend("interpreted" if device == "cpu" else "triton", device)
        check_step_view(backend, view)
        return cls(view, page_table, view.mask, backend.name)

    def rebind(self, view: View) -> bool:
        """Tell whether a later view of the same layer has the same storage addresses."""
        return _get_memory_key(view) == _get_memory_key(self.view)

    def write_rows(self, keys: Tensor, values: Tensor) -> None:
        write_token(self.view, self.page_table, keys, values)

    def attend(self, request: AttentionRequest) -> Tensor:
        return attend_token(self.view, self.page_table, request)


def _get_memory_key(view: View) -> tuple[object, ...]:
    """Return what a captured launch depends on besides the page table: addresses and settings."""
    sides = view.keys, view.values
    tensors = [tensor for side in sides for tensor in (side.open, *side.sealed.values())]
    storage = tuple((tensor.data_ptr(), tensor.shape) for tensor in tensors)
    return storage, view.keys.codec, view.values.codec, view.mask, view.page_table.layer_group
