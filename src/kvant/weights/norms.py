"""Fuse RMSNorm modules of a model: compute each in one pass on a CPU.

A model computes an RMSNorm in eight operators, most of which read or write all rows. For one token
the calls take longer than the arithmetic. A fused norm gives the same bits, which a trial checks;
norms with another formula are left as they are.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvant.native import DTYPE_CODES, NORM_DIMS, get_library, norm_rows
from kvant.platform.torch_runtime import is_tracing

EPS_NAMES = ("variance_epsilon", "eps")  # attributes of norm modules
WEIGHT_NAME, FORWARD_NAME = "weight", "forward"
SCALAR_TYPES = (bool, int, float, str)
TRIAL_INPUTS = ((1, 1.0), (1, 1e-3), (64, 30.0), (65, 1.0), (1, 0.0))  # rows, magnitude
TrialResults = dict[tuple[object, ...], bool]


class FusedNorm:
    """The forward of a fused norm; calls the original one if a gradient is needed, for example."""

    def __init__(self, module: nn.Module, eps_name: str, weight: Tensor) -> None:
        self.module = module
        self.eps_name = eps_name
        self.shape, self.dtype = weight.shape, weight.dtype  # the only ones tried

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight = self.module._parameters.get(WEIGHT_NAME)
        if len(args) == 1 and not kwargs and type(weight) is nn.Parameter:
            x = args[0]
            if type(x) is Tensor and self._can_fuse(x, weight):
                return norm_rows(x, weight, getattr(self.module, self.eps_name))
        return type(self.module).forward(self.module, *args, **kwargs)

    def _can_fuse(self, x: Tensor, weight: Tensor) -> bool:
        """Tell whether the kernel can read rows and weight, and no gradient is needed."""
        needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        return (
            not (needs_grad or is_tracing())
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
        """Pickle the original forward."""
        return partial, (type(self.module).forward, self.module)


def is_fused(module: nn.Module) -> bool:
    return isinstance(vars(module).get(FORWARD_NAME), FusedNorm)


def fuse_norm(module: nn.Module, trials: TrialResults) -> bool:
    """Fuse a norm if the kernel gives the same bits; return whether the norm is fused.

    Norms of the same class, settings and weight shape share one trial.
    """
    if is_fused(module):
        return True
    weight = module._parameters.get(WEIGHT_NAME)
    eps = next((name for name in EPS_NAMES if isinstance(vars(module).get(name), float)), None)
    if weight is None or eps is None or not _is_candidate(module, weight):
        return False
    settings = tuple(item for item in vars(module).items() if isinstance(item[1], SCALAR_TYPES))
    key = type(module), weight.shape, weight.dtype, settings
    if key not in trials:
        trials[key] = _gives_same_bits(module, eps, weight)
    if trials[key]:
        module.__dict__[FORWARD_NAME] = FusedNorm(module, eps, weight)
    return trials[key]


def unfuse_norm(module: nn.Module) -> None:
    """Restore the original forward of a norm."""
    if is_fused(module):
        del module.__dict__[FORWARD_NAME]


def _is_candidate(module: nn.Module, weight: Tensor) -> bool:
    """Tell whether a module may be an RMSNorm that the kernel computes.

    Its only state is a 16-bit weight on a CPU, and the forward of its class takes one argument.
    """
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
    """Tell whether a module uses its class's forward, or the partial of it that pickling left."""
    override, forward = vars(module).get(FORWARD_NAME), type(module).forward
    if isinstance(override, partial):
        return override.func is forward and override.args == (module,) and not override.keywords
    return override is None


def _gives_same_bits(module: nn.Module, eps_name: str, weight: Tensor) -> bool:
    """Tell whether the kernel gives the module's outputs, bit by bit, for random rows and weights.

    Rounding to 16 bits may hide a different sum, so the trial is repeated in float32.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    other = copy.copy(module)
    for dtype in (weight.dtype, torch.float32):
        trial_weight = nn.Parameter(draw(weight.shape).to(dtype), requires_grad=False)
        other.__dict__["_parameters"] = {WEIGHT_NAME: trial_weight}
        for rows, magnitude in TRIAL_INPUTS:
            x = (magnitude * draw(1, rows, len(trial_weight))).to(dtype)
            try:
                with torch.autocast("cpu", enabled=False):
                    plain = type(module).forward(other, x)
            except Exception:  # a forward with another signature
                return False
            if type(plain) is not Tensor or plain.dtype != dtype:
                return False
            fused = norm_rows(x, trial_weight, getattr(other, eps_name))
            if not torch.equal(plain.view(torch.uint8), fused.view(torch.uint8)):
                return False
    return True
