"""A forward as a CUDA graph: asked for once, and then replayed without Python."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor], Tensor]  # of tensors that keep their addresses
Capture = Callable[[Forward, Tensor, Tensor], Forward]


def captured(forward: Forward, ids: Tensor, places: Tensor) -> Forward:
    """A replay, which reads the same two tensors whatever it is given, and writes over its output.

    An operation that cannot be captured, as one that waits for the device, raises an error.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(ids.device)
    with (
        torch.cuda.device(ids.device),
        torch.cuda.stream(stream),  # where a capture fails, its own would stay the current one
        # Other threads may go on with what it would forbid them.
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        out = forward(ids, places)

    def replay(*same: Tensor) -> Tensor:
        graph.replay()
        return out

    return replay
