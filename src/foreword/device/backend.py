"""Backends of `prepare_inputs` that prepare steps on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec

from foreword.arrays import AnyArray
from foreword.batch import BatchTensors, InputBuffers, Plan, PlanError, RequestStates, TensorBackend, backend_of
from foreword.batch.step.layout import GATHERED, Scalars
from foreword.device.api import DeviceApi, Tensor
from foreword.device.rows import DeviceRows
from foreword.errors import ConfigError
from foreword.installation import install


class DeviceBackend(TensorBackend):
    """prepare_inputs(states, plan, buffers, backend=DeviceBackend(rows)): the host checks the plan, the device prepares
    the step, and its tensors are `InputBatch.tensors`.

    commits: whether the caller launches `DeviceRows.commit` with the samples of every step, before these are committed
    to the states. False: the rows follow the states, and a step needs only `RequestStates.commit`.
    reads_back: whether the device's tensors replace the host's in the buffers, so that ``check="full"`` checks them
    against the specification. The backend then waits for the device; this is for tests and engines under development.
    """

    def __init__(self, rows: DeviceRows, *, commits: bool = False, reads_back: bool = True) -> None:
        self.rows, self.reads_back = rows, reads_back
        self._last: tuple[InputBuffers, int] | None = None
        if not commits:
            rows.follow_host()

    def __call__(
        self, states: RequestStates, buffers: InputBuffers, plan: Plan, pad: tuple[int, int], gather: bool
    ) -> Scalars:
        scalars = backend_of("auto")(states, buffers, plan, pad, gather)
        self._last = None
        slot = self.rows.send(buffers)
        self.rows.prepare(scalars.num_tokens_padded, scalars.num_reqs_padded)
        if gather:
            self.rows.gather(scalars.num_reqs_padded)
        slot.launched()
        self._last = buffers, buffers.generation
        if self.reads_back:
            self._read_back(buffers, gather)
        return scalars

    def _read_back(self, buffers: InputBuffers, gather: bool) -> None:
        for name, values in self.rows.read_back(buffers).items():
            if name not in buffers.arrays or (name in GATHERED and not gather):
                continue
            if isinstance(values, list):
                for g, mine in enumerate(values):
                    buffers[name][g][: len(mine)] = mine
            else:
                buffers[name][: len(values)] = values

    def tensors(self, batch: BatchTensors) -> Mapping[str, Tensor]:
        """See `TensorBackend.tensors`. Raise PlanError if the rows have prepared another step since."""
        if self._last != (batch.buffers, batch.buffers.generation):
            raise PlanError("the rows on the device have prepared another step since: make a DeviceBackend, with rows "
                            "of its own, for each InputBuffers", step=batch.step, tensor="tensors")  # fmt: skip
        return _StepTensors(batch, self.rows)

    def check(self, batch: BatchTensors) -> None:
        """See `TensorBackend.check`. A step that is not resolved yet is compared when it is resolved."""
        if batch.is_resolved:
            self.rows.check(batch)


class _StepTensors(Mapping[str, Tensor]):
    """Every tensor of a batch on the device, by name: views of the tensors that the kernels make, and copies of the
    others.
    """

    def __init__(self, batch: BatchTensors, rows: DeviceRows) -> None:
        self._batch, self._api = batch, rows.api
        views = rows.views(batch.buffers)
        self._made = {name: view for name, view in views.items() if batch.is_gathered or name not in GATHERED}
        absent = {*GATHERED, "dcp_local_seq_lens"}
        self._names = tuple(dict.fromkeys([*self._made, *(name for name in _names_of_arrays() if name not in absent)]))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._made:
            view = self._made[name]
            return tuple(view) if isinstance(view, list) else view
        if name not in self._names:
            raise KeyError(name)
        return _copied(self._api, getattr(self._batch, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@cache
def _names_of_arrays() -> tuple[str, ...]:
    """Return the arrays of a batch by their names in it."""
    from foreword.batch.proof.spec import TENSORS, Level  # imported here because the specification is large

    of_batch = Level.REQUEST, Level.TOKEN, Level.LOGIT
    return tuple(spec.name for spec in TENSORS if spec.level in of_batch and spec.shape and spec.attribute is None)


def _copied(api: DeviceApi, array: AnyArray) -> Tensor:
    import torch

    tensor = api.zeros(array.shape, array.dtype.name)
    api.copy(tensor, torch.from_numpy(array.copy()))
    return tensor


class _OwnRows(TensorBackend):
    """The backend "device": each `InputBuffers` has its own rows on the device, created with its first step."""

    def __call__(
        self, states: RequestStates, buffers: InputBuffers, plan: Plan, pad: tuple[int, int], gather: bool
    ) -> Scalars:
        return _backend_of(buffers)(states, buffers, plan, pad, gather)

    def tensors(self, batch: BatchTensors) -> Mapping[str, Tensor]:
        """See `TensorBackend.tensors`."""
        return _backend_of(batch.buffers).tensors(batch)

    def check(self, batch: BatchTensors) -> None:
        """See `TensorBackend.check`."""
        _backend_of(batch.buffers).check(batch)


DEVICE = _OwnRows()


def _backend_of(buffers: InputBuffers) -> DeviceBackend:
    return buffers.attach(DeviceBackend, _new_backend)


def _new_backend(buffers: InputBuffers) -> DeviceBackend:
    rows = DeviceRows(buffers.states, _device(), max_num_batched_tokens=buffers.max_num_batched_tokens)
    return DeviceBackend(rows, reads_back=False)


def _device() -> DeviceApi:
    """Return torch's current GPU. If there is none and TRITON_INTERPRET=1, return Triton's interpreter."""
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"backend='device': {' and '.join(missing)} not installed. {install('torch')} Or use backend='auto'."
        )
    import torch
    import triton

    if triton.knobs.runtime.interpret:
        from foreword.device.interpreter import InterpretedDevice

        return InterpretedDevice()
    if not torch.cuda.is_available():
        raise ConfigError(
            "backend='device': torch finds no GPU; use backend='auto', or TRITON_INTERPRET=1 for Triton's interpreter"
        )
    from foreword.device.cuda import CudaDevice

    return CudaDevice()
