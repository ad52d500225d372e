"""A backend of `prepare_inputs` that shows what the device prepared."""

from __future__ import annotations

from foreword.batch import InputBuffers, Plan, RequestStates, backend_of
from foreword.batch.step.layout import GATHERED, Scalars
from foreword.device.rows import DeviceRows


class DeviceBackend:
    """prepare_inputs(states, plan, buffers, backend=DeviceBackend(rows)): the host checks the plan, the device prepares
    the step, and its tensors replace the host's in the buffers.

    With ``check="full"`` the specification is so proved of the device's tensors. It reads them back, and waits for
    that: for tests, and for engines under development. Otherwise call `DeviceRows` after `prepare_inputs`.
    """

    def __init__(self, rows: DeviceRows) -> None:
        self.rows = rows

    def __call__(
        self, states: RequestStates, buffers: InputBuffers, plan: Plan, pad: tuple[int, int], gather: bool
    ) -> Scalars:
        scalars = backend_of("auto")(states, buffers, plan, pad, gather)
        slot = self.rows.send(buffers)
        self.rows.prepare(scalars.num_tokens_padded, scalars.num_reqs_padded)
        if gather:
            self.rows.gather(scalars.num_reqs_padded)
        slot.launched()
        for name, values in self.rows.read_back(buffers).items():
            if name not in buffers.arrays or (name in GATHERED and not gather):
                continue
            if isinstance(values, list):
                for g, mine in enumerate(values):
                    buffers[name][g][: len(mine)] = mine
            else:
                buffers[name][: len(values)] = values
        return scalars
