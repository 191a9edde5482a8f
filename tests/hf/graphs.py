"""A forward captured without a GPU: traced to operators, in which all numbers stay what they were.

As in a CUDA graph, whatever Python computed is done once, and a tensor that is asked for its value
is an error. The traced operators run on the same tensors, so memory is written to in place.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kvant.hf.replay import StaticForward


def traced(forward: StaticForward, ids: Tensor, lengths: Tensor) -> StaticForward:
    with patch("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True):
        graph: Any = make_fx(forward, _error_on_data_dependent_ops=True)(ids, lengths)
    return graph
