"""Prepare steps on a device, which has a mirror of the rows, gets one packet per step, and makes every tensor by
kernels.

    rows = DeviceRows(states, CudaDevice(), max_num_batched_tokens=8192)
    batch = prepare_inputs(states, plan, buffers)     # the host checks the plan and keeps the states
    rows.send(buffers)                                # one copy to the device: the plan, and what changed
    rows.prepare(tokens, reqs)                        # kernels: rows.tensors hold the step
    …                                                 # the model, then samples int32 [B, W] in rows.tensors["sampled"]
    rows.commit(reqs)                                 # kernel: the samples enter the rows

Prepare, model and commit are launched in one stream and can be captured as one graph. No part of a step waits for the
host. A step may be sent before the samples of the step before are known there, because its kernels read them from the
rows. The kernels need torch and Triton (Linux); this package and `foreword.device.api` import neither.
"""

from foreword.device.api import DeviceApi, Event, Graph
from foreword.device.layout import RowLayout
from foreword.device.ring import PacketRing, PacketSlot

__all__ = ["DeviceApi", "Event", "Graph", "PacketRing", "PacketSlot", "RowLayout"]
