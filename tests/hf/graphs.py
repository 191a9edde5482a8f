"""A forward captured without a GPU: traced to operators, with all numbers constant.

As in a CUDA graph, Python code runs once, and reading a tensor's value is an error. The traced
operators run on the same tensors, so memory is written in place.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from attention.kernels import GPU
from kvant.replay.capture import CaptureFunction, StaticForward


def trace_forward(forward: StaticForward, ids: Tensor, lengths: Tensor) -> StaticForward:
    with patch("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True):
        graph: Any = make_fx(forward, _error_on_data_dependent_ops=True)(ids, lengths)
    return graph


# None on a GPU: a decoder captures CUDA graphs there.
CAPTURE: CaptureFunction | None = None if GPU else trace_forward
