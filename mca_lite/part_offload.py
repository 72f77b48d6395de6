"""Optimizer states in host memory, and their updates there."""

import torch


class OffloadedOptimizer:
    """An optimizer with the states of a share of its parameters in host memory, updated there: the
    first ones, up to `fraction` of all elements. on_host: these parameters.

    The weights stay on their device: an update copies them and their gradients to the host and
    back. megatron's crashes in bf16 without its distributed optimizer and in float32 with it, and
    a loaded checkpoint does not reach its copies of the weights.
    """

    def __init__(self, inner: torch.optim.Optimizer, fraction: float, make):
        """make(groups) -> an optimizer of the same kind as `inner`."""
        self.inner = inner
        parameters = [p for group in inner.param_groups for p in group["params"]]
        left = fraction * sum(p.numel() for p in parameters)
        # an update on the host is one of stand-ins, with tensors during the update alone
        self._stand_ins: dict[torch.Tensor, torch.nn.Parameter] = {}
        for parameter in parameters:
            if left > 0:
                self._stand_ins[parameter] = torch.nn.Parameter(torch.empty(0, device="cpu"))
            left -= parameter.numel()
        self.on_host = set(self._stand_ins)
        self._host = make([{"params": [torch.nn.Parameter(torch.empty(0, device="cpu"))]}])

    def _host_groups(self) -> list[dict]:
        groups = []
        for group in self.param_groups:
            params = [self._stand_ins[p] for p in group["params"] if p in self._stand_ins]
            groups.append({**group, "params": params})
        return groups

    @property
    def param_groups(self) -> list[dict]:
        return self.inner.param_groups

    @property
    def state(self) -> dict:
        """States of each parameter, CPU tensors for those on the host."""
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def settle(self, parameter: torch.Tensor) -> None:
        """Move a parameter's states to the device of its updates, after a checkpoint's load."""
        if parameter in self.on_host:
            states = self.state[parameter]
            self.state[parameter] = {name: value.cpu() for name, value in states.items()}

    @torch.no_grad()
    def step(self) -> None:
        gradients = {p: p.grad for p in self._stand_ins if p.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        self.inner.step()  # of all others
        self._host.param_groups = self._host_groups()
        for parameter, gradient in gradients.items():
            stand_in = self._stand_ins[parameter]
            stand_in.data = _to_host(parameter)
            stand_in.grad = _to_host(gradient)
            self._host.state[stand_in] = self.state.get(parameter, {})
        if gradients and next(iter(gradients)).is_cuda:
            torch.cuda.synchronize()  # the copies are there
        self._host.step()
        for parameter, gradient in gradients.items():
            stand_in = self._stand_ins[parameter]
            parameter.copy_(stand_in, non_blocking=True)
            parameter.grad = gradient
            self.state[parameter] = self._host.state.pop(stand_in)
            stand_in.data = torch.empty(0, device="cpu")
            stand_in.grad = None


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, under way."""
    pinned = tensor.is_cuda
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return copy.copy_(tensor, non_blocking=True)
