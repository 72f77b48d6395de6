"""An optimizer that keeps the states of some or all parameters in host memory, and updates these
parameters there."""

from collections.abc import Callable
from typing import Any

import torch

from .tables import ParamGroups


class OffloadedOptimizer:
    """An optimizer that keeps the states of some parameters in host memory and updates these
    parameters there. They are the first parameters, up to and including the one that reaches
    `fraction` of all elements; on_host is their set.

    Weights stay on their device; an update copies the weights and gradients of these parameters to
    the host, and the weights back."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        fraction: float,
        make: Callable[[ParamGroups], torch.optim.Optimizer],
    ):
        """inner: the optimizer of all parameters. fraction: the share of their elements to update
        on the host, 0 to 1. make(groups): builds an optimizer of the same kind for the host."""
        self.inner = inner
        parameters = [p for group in inner.param_groups for p in group["params"]]
        left = fraction * sum(p.numel() for p in parameters)
        # the host's optimizer updates stand-ins, which have data only during the update
        self._stand_ins: dict[torch.Tensor, torch.nn.Parameter] = {}
        for parameter in parameters:
            if left > 0:
                self._stand_ins[parameter] = torch.nn.Parameter(torch.empty(0, device="cpu"))
            left -= parameter.numel()
        self.on_host = set(self._stand_ins)
        self._host = make([{"params": [torch.nn.Parameter(torch.empty(0, device="cpu"))]}])

    def _host_groups(self) -> ParamGroups:
        """Make the parameter groups of the host's optimizer: those of the wrapped optimizer, with
        the same options, but only the offloaded parameters. Each is replaced by a stand-in, which
        holds its values on the CPU during an update that it takes part in."""
        groups = []
        for group in self.param_groups:
            params = [self._stand_ins[p] for p in group["params"] if p in self._stand_ins]
            groups.append({**group, "params": params})
        return groups

    @property
    def param_groups(self) -> ParamGroups:
        return self.inner.param_groups

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """{parameter: its optimizer states}. Those of offloaded parameters are CPU tensors, except
        after a checkpoint was loaded onto the device, until settle() moves them."""
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def settle(self, parameter: torch.Tensor) -> None:
        """Move the optimizer states of one parameter to host memory, if the parameter is offloaded;
        otherwise do nothing. For the time after a checkpoint was loaded, which may put states on
        the device."""
        if parameter in self.on_host:
            states = self.state[parameter]
            self.state[parameter] = {name: value.cpu() for name, value in states.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient: those on the device, then the offloaded ones
        on the host."""
        gradients = {p: p.grad for p in self._stand_ins if p.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        self.inner.step()  # updates the parameters that still have a gradient
        self._host.param_groups = self._host_groups()
        for parameter, gradient in gradients.items():
            stand_in = self._stand_ins[parameter]
            stand_in.data = _to_host(parameter)
            stand_in.grad = _to_host(gradient)
            self._host.state[stand_in] = self.state.get(parameter, {})
        if gradients and next(iter(gradients)).is_cuda:
            torch.cuda.synchronize()  # wait for the copies
        self._host.step()
        for parameter, gradient in gradients.items():
            stand_in = self._stand_ins[parameter]
            parameter.copy_(stand_in, non_blocking=True)
            parameter.grad = gradient
            self.state[parameter] = self._host.state.pop(stand_in)
            stand_in.data = torch.empty(0, device="cpu")
            stand_in.grad = None


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor to host memory -> the copy. From a GPU the copy is asynchronous, into
    pinned memory."""
    pinned = tensor.is_cuda
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return copy.copy_(tensor, non_blocking=True)
