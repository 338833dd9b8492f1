"""Tensors between device and host that nobody waits for until they are needed.

A plain copy waits for all that the device was asked to do, the steps after it included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Awaited:
    """A tensor on its way to the host.

    Args:
        tensor: on any device; its copy starts at once, in the order of the current stream.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def value(self) -> Tensor:
        """The tensor on the host, once it is there; waits for nothing that was asked later."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, without waiting for the device."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
