"""Tensors of a runner as arrays on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class HostCopies:
    """The values of a step on the host. Values of a device are available when their copies are done.

    copies: whether the runner may change host memory before the values are read.
    with_device: whether tensors of a device are copied; otherwise they are left out.
    """

    def __init__(self, values: Mapping[str, Any], stream: torch.cuda.Stream | None, *, copies: bool, with_device: bool):
        self._copies, self._with_device = copies, with_device
        self._event: torch.cuda.Event | None = None
        if stream is None:
            self._values = {name: self._hosted(value) for name, value in values.items()}
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._values = {name: self._hosted(value) for name, value in values.items()}
            self._event = torch.cuda.Event()
            self._event.record(stream)

    @property
    def is_ready(self) -> bool:
        """Return whether `arrays` returns without waiting."""
        return self._event is None or bool(self._event.query())

    def arrays(self) -> dict[str, Any]:
        """Return the values as arrays, numbers and lists of them, by name."""
        if self._event is not None:
            self._event.synchronize()
        return {name: _as_array(value) for name, value in self._values.items() if value is not None}

    def _hosted(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._hosted(part) for part in value]
        if isinstance(value, np.ndarray):
            return value.copy() if self._copies else value
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type == "cpu":
            return value.clone() if self._copies else value
        if not self._with_device:
            return None
        value.record_stream(torch.cuda.current_stream(value.device))
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


def _as_array(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_array(part) for part in value]
    return value.numpy() if isinstance(value, torch.Tensor) else value
