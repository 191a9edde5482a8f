"""Norms by the root of the mean of squares, computed in one pass on a CPU.

A model computes one in seven operators, which read and write its rows seven times: for one token,
calling them takes longer than computing. What is given here is the same to the bit, which a trial
shows; a norm of another formula is left as it is.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvant.modes import passing
from kvant.native import DTYPES, NORMED_DIMS, library, normed

EPS = ("variance_epsilon", "eps")  # what models call it
FORWARD = "forward"
Tried = dict[Any, bool]


class OnePass:
    """Stands before the forward of a norm, which computes the rest: under autograd, say."""

    def __init__(self, module: nn.Module, eps: str) -> None:
        self.module = module
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.module._parameters["weight"]
        if type(x) is Tensor and type(weight) is nn.Parameter and _fits(x, weight):
            return normed(x, weight, getattr(self.module, self.eps))
        out: Tensor = self.plain(x)
        return out

    @property
    def plain(self) -> Any:
        return partial(type(self.module).forward, self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnePass:
        return OnePass(copy.deepcopy(self.module, memo), self.eps)

    def __reduce__(self) -> Any:
        """What is written to a file is the model's own."""
        return partial, (type(self.module).forward, self.module)


def fuse(module: nn.Module, tried: Tried) -> bool:
    """Let a norm compute in one pass where that gives its bits; one of each kind is tried."""
    if isinstance(vars(module).get(FORWARD), OnePass):
        return True
    eps = next((name for name in EPS if isinstance(vars(module).get(name), float)), None)
    if eps is None or not _is_candidate(module):
        return False
    weight = module._parameters["weight"]
    assert weight is not None
    kind = type(module), weight.shape, weight.dtype, getattr(module, eps)
    if kind not in tried:
        tried[kind] = _same(module, eps)
    if tried[kind]:
        module.__dict__[FORWARD] = OnePass(module, eps)
    return tried[kind]


def part(module: nn.Module) -> None:
    """Let a norm compute as it did before."""
    if isinstance(vars(module).get(FORWARD), OnePass):
        del module.__dict__[FORWARD]


def _is_candidate(module: nn.Module) -> bool:
    """Has it a weight of 16 bits on a CPU, and nothing else, and the forward of its class?"""
    weight = module._parameters.get("weight")
    return (
        library().functions is not None
        and list(module._parameters) == ["weight"]
        and not (module._modules or module._buffers or FORWARD in vars(module))
        and type(weight) is nn.Parameter
        and weight.ndim == 1
        and weight.is_cpu
        and weight.itemsize == 2
        and weight.dtype in DTYPES
        and weight.shape[0] in NORMED_DIMS
    )


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Rows and a weight that lie in memory as the kernel reads them, and no gradient wanted?"""
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return (
        not wanted
        and x.dtype is weight.dtype
        and (x.is_cpu and weight.is_cpu)
        and (x.ndim > 0 and x.shape[-1:] == weight.shape)
        and (x.is_contiguous() and weight.is_contiguous())
        and not (torch.is_autocast_enabled("cpu") or passing())
    )


def _same(module: nn.Module, eps: str) -> bool:
    """Are its outputs the same to the bit? Tried with a weight that is not all ones, say."""
    own, generator = module._parameters["weight"], torch.Generator().manual_seed(0)
    assert own is not None
    dim, dtype = own.shape[0], own.dtype
    weight = nn.Parameter(torch.randn(dim, generator=generator).to(dtype), requires_grad=False)
    other = copy.copy(module)
    other.__dict__["_parameters"] = {"weight": weight}
    ours = OnePass(other, eps)
    for rows, size in ((1, 1.0), (1, 1e-3), (64, 30.0), (65, 1.0), (1, 0.0)):
        x = (size * torch.randn(1, rows, dim, generator=generator)).to(dtype)
        try:
            plain = ours.plain(x)
        except Exception:  # it takes something else
            return False
        if type(plain) is not Tensor or plain.dtype != dtype:
            return False
        if not torch.equal(plain.view(torch.int16), ours(x).view(torch.int16)):
            return False
    return True
