"""Norms by the root of the mean of squares, fused: computed in one pass on a CPU.

A model computes one in eight operators, most of which read or write all rows: for one token,
calling them takes longer than computing. What is given here is the same to the bit, which a trial
shows; a norm of another formula is left as it is.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvant.native import DTYPE_CODES, NORM_DIMS, get_library, norm_rows
from kvant.torch_modes import is_tracing

EPS_NAMES = ("variance_epsilon", "eps")  # what models call it
WEIGHT_NAME, FORWARD_NAME = "weight", "forward"
SCALAR_TYPES = (bool, int, float, str)
TRIAL_INPUTS = ((1, 1.0), (1, 1e-3), (64, 30.0), (65, 1.0), (1, 0.0))  # rows, and their size
TrialResults = dict[Any, bool]


class FusedNorm:
    """Stands before the forward of a norm, which computes the rest: under autograd, say."""

    def __init__(self, module: nn.Module, eps_name: str, weight: Tensor) -> None:
        self.module = module
        self.eps_name = eps_name
        self.shape, self.dtype = weight.shape, weight.dtype  # that were tried

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight = self.module._parameters.get(WEIGHT_NAME)
        if len(args) == 1 and not kwargs and type(weight) is nn.Parameter:
            x = args[0]
            if type(x) is Tensor and self._can_fuse(x, weight):
                return norm_rows(x, weight, getattr(self.module, self.eps_name))
        return type(self.module).forward(self.module, *args, **kwargs)

    def _can_fuse(self, x: Tensor, weight: Tensor) -> bool:
        """Rows and a weight that lie in memory as the kernel reads them, and no gradient wanted?"""
        wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        return (
            not (wanted or is_tracing())
            and x.dtype is self.dtype
            and weight.dtype is self.dtype
            and (x.is_cpu and weight.is_cpu)
            and x.shape[-1:] == weight.shape == self.shape
            and (x.is_contiguous() and weight.is_contiguous())
            and not torch.is_autocast_enabled("cpu")
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedNorm:
        other = FusedNorm.__new__(FusedNorm)
        other.__dict__.update(vars(self), module=copy.deepcopy(self.module, memo))
        return other

    def __reduce__(self) -> Any:
        """What is written to a file is the model's own."""
        return partial, (type(self.module).forward, self.module)


def is_fused(module: nn.Module) -> bool:
    return isinstance(vars(module).get(FORWARD_NAME), FusedNorm)


def fuse_norm(module: nn.Module, trials: TrialResults) -> bool:
    """Let a norm compute in one pass where that gives its bits; one of each kind is tried."""
    if is_fused(module):
        return True
    weight = module._parameters.get(WEIGHT_NAME)
    eps = next((name for name in EPS_NAMES if isinstance(vars(module).get(name), float)), None)
    if weight is None or eps is None or not _is_candidate(module, weight):
        return False
    told = tuple(item for item in vars(module).items() if isinstance(item[1], SCALAR_TYPES))
    kind = type(module), weight.shape, weight.dtype, told
    if kind not in trials:
        trials[kind] = _gives_same_bits(module, eps, weight)
    if trials[kind]:
        module.__dict__[FORWARD_NAME] = FusedNorm(module, eps, weight)
    return trials[kind]


def unfuse_norm(module: nn.Module) -> None:
    """Let a norm compute as it did before."""
    if is_fused(module):
        del module.__dict__[FORWARD_NAME]


def _is_candidate(module: nn.Module, weight: Tensor) -> bool:
    """Has it a weight of 16 bits on a CPU, and nothing else, and the forward of its class?"""
    return (
        get_library().functions is not None
        and list(module._parameters) == [WEIGHT_NAME]
        and not (module._modules or module._buffers)
        and type(weight) is nn.Parameter
        and weight.ndim == 1
        and weight.is_cpu
        and weight.itemsize == 2
        and weight.dtype in DTYPE_CODES
        and weight.shape[0] in NORM_DIMS
        and len(inspect.signature(type(module).forward).parameters) == 2
        and _has_own_forward(module)
    )


def _has_own_forward(module: nn.Module) -> bool:
    """That of its class: one that was fused, and came from a file, is as well."""
    found, own = vars(module).get(FORWARD_NAME), type(module).forward
    if isinstance(found, partial):
        return found.func is own and found.args == (module,) and not found.keywords
    return found is None


def _gives_same_bits(module: nn.Module, eps_name: str, weight: Tensor) -> bool:
    """Are its outputs the same to the bit?

    Tried with a weight that is not all ones, and in float32 as well, which shows the last bit of
    a sum.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    other = copy.copy(module)
    for dtype in (weight.dtype, torch.float32):
        own = nn.Parameter(draw(weight.shape).to(dtype), requires_grad=False)
        other.__dict__["_parameters"] = {WEIGHT_NAME: own}
        for rows, size in TRIAL_INPUTS:
            x = (size * draw(1, rows, len(own))).to(dtype)
            try:
                with torch.autocast("cpu", enabled=False):
                    plain = type(module).forward(other, x)
            except Exception:  # it takes something else
                return False
            if type(plain) is not Tensor or plain.dtype != dtype:
                return False
            both = (
                one.view(torch.uint8)
                for one in (plain, norm_rows(x, own, getattr(other, eps_name)))
            )
            if not torch.equal(*both):
                return False
    return True
