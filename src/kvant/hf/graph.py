"""A forward as a CUDA graph: asked for once, and then replayed without Python.

Compiled before, if that is asked for: what lies between matrix products becomes few kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import CompileConfig

Forward = Callable[[Tensor, Tensor], Tensor]  # of tensors that keep their addresses
Capture = Callable[[Forward, Tensor, Tensor], Forward]


def captured(forward: Forward, ids: Tensor, lengths: Tensor) -> Forward:
    """A replay, which reads the same two tensors whatever it is given, and writes over its output.

    An operation that cannot be captured, as one that waits for the device, raises an error.
    """
    _check_unsynchronized(forward, ids, lengths)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(ids.device)
    with (
        torch.cuda.device(ids.device),
        torch.cuda.stream(stream),  # where a capture fails, its own would stay the current one
        torch.cuda.graph(
            graph,
            # Without one it is that of the device which captured first.
            stream=torch.cuda.Stream(ids.device),  # type: ignore[no-untyped-call]
            capture_error_mode="thread_local",  # other threads may do what it would forbid them
        ),
    ):
        out = forward(ids, lengths)

    def replay(*same: Tensor) -> Tensor:
        graph.replay()
        return out

    return replay


def _check_unsynchronized(forward: Forward, ids: Tensor, lengths: Tensor) -> None:
    """An error where something waits for the device, which leaves more behind in a capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(ids, lengths)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def capturing(capture: Capture, config: CompileConfig | None) -> Capture:
    """What captures a forward, compiled as the host's configuration of that says."""
    return capture if config is None else partial(_compiled, capture, config)


def _compiled(
    capture: Capture, config: CompileConfig, forward: Forward, ids: Tensor, lengths: Tensor
) -> Forward:
    from torch.fx.experimental.proxy_tensor import make_fx

    # Handles are nothing that a compiler understands; the operators behind them are.
    graph = make_fx(forward, _error_on_data_dependent_ops=True)(ids, lengths)
    how = {"backend": config.backend, "options": config.options}
    compiled = torch.compile(graph, fullgraph=True, dynamic=False, **how)
    compiled(ids, lengths)  # compiles, which cannot be captured
    return capture(compiled, ids, lengths)
