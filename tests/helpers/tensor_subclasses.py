"""A wrapper subclass of tensors, and an optimizer whose state has such tensors."""

from __future__ import annotations

import torch

from tests.helpers.states import is_equal


class Scaled(torch.Tensor):
    """As torchao's: it reports shape and dtype of what it stands for, holds codes and scales, and does nothing else."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes, scale, signed=True):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, signed=True):
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.signed, (1, 2), object()]

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scale.detach(), args[0].signed)
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(func)


class EightBits(torch.optim.Optimizer):
    """Has moments of a class of its own, as torchao's optimizers."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = Scaled(
                    torch.zeros(parameter.shape, dtype=torch.int8), torch.zeros(len(parameter), 1))
            state["exp_avg"].codes += 3
            state["exp_avg"].scale += parameter.grad.abs().amax(-1, keepdim=True)
            parameter -= 0.1 * parameter.grad


def scaled(seed, scale=None, signed=True):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (96, 80), generator=g).to(torch.int8)
    # Large enough to be quantized, were it a weight.
    return Scaled(codes, torch.randn(96, 80, generator=g) if scale is None else scale, signed)


def equal(a, b):
    return type(a) is type(b) and is_equal(a.codes, b.codes) and is_equal(a.scale, b.scale)
