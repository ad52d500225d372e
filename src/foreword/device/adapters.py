"""Apply the LoRA adapters of a step on a device, by launches of the kernels K7 over the adapter of each token."""

from __future__ import annotations

from foreword.device.api import Tensor
from foreword.device.rows import DeviceRows


class DeviceAdapters:
    """Adds the products of adapters to the outputs of a step. Each call is two launches, and can be captured.

    inner: float32, ``max_num_batched_tokens`` times the largest rank; every call overwrites it.
    """

    def __init__(self, rows: DeviceRows, inner: Tensor) -> None:
        self.rows, self.inner = rows, inner

    def apply(self, out: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
        """Compute out[t] += b[adapters[t]] a[adapters[t]] x[t] for out [Tp, outputs] and x [Tp, inputs].

        a: [adapters, rank, at least inputs]; b: [adapters, outputs, rank]. adapters: int32 [Tp], −1 for none.
        """
        api, packet, tokens = self.rows.api, self.rows.packet, len(x)
        rank = a.shape[1]
        api.launch(
            "shrink", (tokens, -(-rank // 16)), packet, adapters, x, a, self.inner, x.shape[1], x.stride(0), a.shape[2],
            rank, BLOCK_RANK=16, BLOCK=128,
        )  # fmt: skip
        api.launch(
            "expand", (tokens, -(-out.shape[1] // 64)), packet, adapters, self.inner, b, out, out.shape[1],
            out.stride(0), rank, BLOCK_RANK=16, BLOCK=64,
        )  # fmt: skip
