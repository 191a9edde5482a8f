"""Capture a forward on a GPU as a CUDA graph, after torch.compile if it is configured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import CompileConfig

StaticForward = Callable[[Tensor, Tensor], Tensor]  # (ids, lengths), at fixed addresses
CaptureFunction = Callable[[StaticForward, Tensor, Tensor], StaticForward]


def capture_graph(forward: StaticForward, ids: Tensor, lengths: Tensor) -> StaticForward:
    """Capture a forward as a CUDA graph; its replay ignores arguments and reuses its output.

    An operation that cannot be captured, such as a synchronization, raises an error.
    """
    _check_no_synchronization(forward, ids, lengths)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(ids.device)
    with (
        torch.cuda.device(ids.device),
        torch.cuda.stream(stream),  # restored even if the capture fails
        torch.cuda.graph(
            graph,
            # The default is a stream of the device that captured first.
            stream=torch.cuda.Stream(ids.device),  # type: ignore[no-untyped-call]
            capture_error_mode="thread_local",  # do not restrict other threads
        ),
    ):
        out = forward(ids, lengths)

    def replay(*inputs: Tensor) -> Tensor:
        graph.replay()
        return out

    return replay


def _check_no_synchronization(forward: StaticForward, ids: Tensor, lengths: Tensor) -> None:
    """Raise an error if the forward synchronizes: inside a capture it could not be undone."""
    previous_mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(ids, lengths)
    finally:
        torch.cuda.set_sync_debug_mode(previous_mode)


def make_capture_function(
    capture: CaptureFunction, config: CompileConfig | None
) -> CaptureFunction:
    """Return `capture`, preceded by torch.compile if there is a configuration for it."""
    return capture if config is None else partial(_compile_and_capture, capture, config)


def _compile_and_capture(
    capture: CaptureFunction,
    config: CompileConfig,
    forward: StaticForward,
    ids: Tensor,
    lengths: Tensor,
) -> StaticForward:
    from torch.fx.experimental.proxy_tensor import make_fx

    # The compiler does not understand handles, but the operators that they call.
    graph = make_fx(forward, _error_on_data_dependent_ops=True)(ids, lengths)
    options = {"backend": config.backend, "options": config.options}
    compiled = torch.compile(graph, fullgraph=True, dynamic=False, **options)
    compiled(ids, lengths)  # compile now: compilation cannot be captured
    return capture(compiled, ids, lengths)
