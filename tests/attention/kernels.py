"""Device of the Triton kernels under test: a GPU, or the CPU with Triton's interpreter."""

from importlib.util import find_spec

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
NAME = "triton" if GPU else "interpreted"

needed = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
