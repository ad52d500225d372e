"""prepare_inputs(backend="device"): the tensors on the device are those of the definition, whatever happens to rows."""

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import test_random_traces
import test_vllm_apply
import torch
from batch_scenes import SCENES, TENSOR_NAMES, scene
from device_place import Device, host

from foreword.batch import (
    InputBatch,
    InputBuffers,
    KVGroup,
    NewRequest,
    PlanError,
    RequestStates,
    StaleBatchError,
    admit_drafts,
    advance,
    prepare_inputs,
    resolve,
)
from foreword.device import layout
from foreword.device.backend import DeviceBackend
from foreword.device.recording import RecordingDevice
from foreword.device.rows import DeviceRows
from foreword.insight import conform

EXAMPLES = int(os.environ.get("FOREWORD_EXAMPLES", 3))


def assert_on_the_device(batch: InputBatch) -> None:
    """Every array of the batch is a torch tensor with the same bits in ``batch.tensors``."""
    absent = [] if batch.is_gathered else ["block_table", "num_blocks"]
    absent += ["dcp_local_seq_lens"] * (batch.states.context_parallel is None)
    tensors = batch.tensors
    assert {*TENSOR_NAMES, "lora_tokens", "rope_positions"} - {*absent} == set(tensors)
    assert len(tensors) == len(set(tensors))
    for name in set(tensors) - {"lora_tokens", "rope_positions"}:
        mine, expected = tensors[name], getattr(batch, name)
        assert type(mine) is (tuple if isinstance(expected, tuple) else torch.Tensor), name
        mine, expected = (mine, expected) if isinstance(mine, tuple) else ((mine,), (expected,))
        for tensor, array in zip(mine, expected, strict=True):
            assert str(tensor.dtype) == f"torch.{array.dtype.name}", name
            assert np.array_equal(host(tensor), array), name


def compared(call):
    """``call`` with the batch that it returns, or gets, compared with its tensors on the device."""

    def wrapped(first, *args, **kw):
        result = call(first, *args, **kw)
        batch = first if result is None else result
        if kw.get("backend", "device") == "device":
            assert_on_the_device(batch)
            wrapped.steps += 1
        return result

    wrapped.steps = 0
    return wrapped


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_tensors_of_random_lives_equal_the_definition(monkeypatch, seed):
    """Chunks, drafts, padding, windows, ranks, removals and rows used again; committed by the host alone."""
    prepare = compared(prepare_inputs)
    monkeypatch.setattr(test_random_traces, "prepare_inputs", prepare)
    monkeypatch.setattr(test_random_traces, "BACKENDS", ("loops", "native", "device"))
    test_random_traces.run_random_lives(4000 + seed, 12)
    assert prepare.steps == 12


@pytest.mark.parametrize("path", conform.golden_vectors(), ids=lambda path: path.stem)
def test_the_golden_traces_are_prepared_on_the_device(monkeypatch, path):
    prepare = compared(prepare_inputs)
    monkeypatch.setattr("foreword.trace.replay.prepare_inputs", prepare)
    report = conform.run(path, backend="device")
    assert report.ok, str(report)
    assert prepare.steps == report.num_steps


@pytest.mark.parametrize("generation", [1, 2])
def test_the_steps_of_a_vllm_scheduler_are_prepared_on_the_device(monkeypatch, generation):
    """Finished, preempted and resumed ids, tokens taken back, computed tokens corrected."""
    to_device = compared(lambda *args, **kw: prepare_inputs(*args, **kw, backend="device"))
    monkeypatch.setattr(test_vllm_apply, "prepare_inputs", to_device)
    test_vllm_apply.test_random_schedules_prepare_what_a_dictionary_of_requests_says(
        generation, "plan", "native", monkeypatch
    )
    assert to_device.steps > 20


@pytest.mark.parametrize("name", SCENES)
def test_every_scene_is_prepared_on_the_device(name):
    """Steps on top of one whose samples are not known, and resolved steps with a request that was removed, too."""
    assert_on_the_device(scene(name, "device").batch)


def test_a_step_trimmed_to_its_admitted_drafts_is_trimmed_on_the_device():
    states = make()
    buffers = InputBuffers.for_states(states, 16)
    states.commit(prepare_inputs(states, {"a": 3, "b": 3}, buffers, backend="device"), {"a": [7], "b": [8]})
    drafts = {"a": [11, 12], "b": [13]}
    batch = prepare_inputs(states, {"a": 3, "c": 2, "b": 2}, buffers, draft_tokens=drafts, backend="device")
    admit_drafts(batch, {"a": 1, "b": 0}, pad_to=(8, 4))
    assert batch.num_scheduled_tokens.tolist() == [2, 2, 1]
    assert_on_the_device(batch)


def make(rows: int = 4) -> RequestStates:
    states = RequestStates(
        max_num_reqs=rows, max_model_len=40, vocab_size=90, kv_groups=[KVGroup(4)], max_num_draft_tokens=2
    )
    for i, name in enumerate("abc"):
        states.add_request(NewRequest(name, [1, 2, 3 + i], [list(range(10 * i + 1, 10 * i + 11))], lora_id=i))
    return states


def test_rows_that_move_between_steps_are_followed():
    states = make()
    buffers = InputBuffers.for_states(states, 16)
    for plan, sampled in (({"a": 3, "b": 2, "c": 3}, {"a": [7], "c": [8]}), ({"c": 1, "b": 1}, {"b": [9], "c": [5]})):
        batch = prepare_inputs(states, plan, buffers, backend="device", check="full")
        states.commit(batch, sampled)
    states.swap_rows(0, 3)
    batch = prepare_inputs(states, {"a": 1, "c": 1}, buffers, backend="device", check="full")
    assert_on_the_device(batch)
    states.commit(batch, {"a": [6], "c": [4]})
    states.remove_request("b")
    assert states.condense()
    batch = prepare_inputs(
        states, {"c": 3, "a": 1}, buffers, draft_tokens={"c": [11, 12]}, backend="device", check="full"
    )
    assert_on_the_device(batch)
    assert batch.tensors["input_ids"].tolist() == [4, 11, 12, 6]


def test_tokens_that_other_backends_committed_and_tokens_taken_back_reach_the_device():
    states = make()
    buffers, others = (InputBuffers.for_states(states, 16) for _ in range(2))

    def step(plan, sampled, backend, into=buffers, **kw):
        batch = prepare_inputs(states, plan, into, backend=backend, **kw)
        if backend == "device":
            assert_on_the_device(batch)
        states.commit(batch, sampled)

    step({"a": 3}, {"a": [20]}, "device")
    step({"a": 3}, {"a": [21, 22, 23]}, "device", draft_tokens={"a": [21, 22]})
    row, progress = states.row_of("a"), states._progress
    progress.truncate(row, 5)  # a scheduler takes back two outputs
    progress.set_computed(row, 4)
    step({"a": 1}, {"a": [31]}, "native", others)
    step({"a": 1}, {"a": [32]}, "native", others)
    step({"a": 1}, {"a": [33]}, "device")
    progress.truncate(row, 7)
    progress.set_computed(row, 5)
    batch = prepare_inputs(states, {"a": 2}, buffers, backend="device")
    assert batch.tensors["input_ids"].tolist() == [31, 32]
    rows = buffers.attach(DeviceBackend, lambda _: pytest.fail("there are no rows")).rows
    assert host(rows.tokens)[row * 40 : row * 40 + 7].tolist() == states.token_ids[row, :7].tolist()


def test_two_steps_in_flight_keep_their_own_tensors():
    states = make()
    first_buffers, second_buffers = (InputBuffers.for_states(states, 16) for _ in range(2))
    first = prepare_inputs(states, {"a": 3}, first_buffers, backend="device")
    advance(states, first)
    second = prepare_inputs(states, {"a": 1}, second_buffers, backend="device", check="full")
    assert_on_the_device(first)
    assert_on_the_device(second)
    assert second.tensors["input_ids"].tolist() == [0]
    states.commit(first, {"a": [44]})
    resolve(second)
    assert_on_the_device(second)
    assert second.tensors["input_ids"].tolist() == [44]
    states.commit(second, {"a": [45]})


def test_tensors_live_as_long_as_the_batch_and_only_on_a_device():
    states = make()
    buffers = InputBuffers.for_states(states, 16)
    batch = prepare_inputs(states, {"a": 3}, buffers, backend="device")
    address = batch.tensors["input_ids"].data_ptr()
    later = prepare_inputs(states, {"b": 3}, buffers, backend="device")
    with pytest.raises(StaleBatchError):
        _ = batch.tensors
    assert later.tensors["input_ids"].data_ptr() == address
    with pytest.raises(KeyError):
        _ = later.tensors["unknown"]
    batch = prepare_inputs(states, {"b": 3}, buffers)
    with pytest.raises(PlanError, match="backend='device'"):
        _ = batch.tensors


def test_rows_that_prepared_another_step_since_are_refused():
    states = make()
    rows = DeviceRows(states, Device(), max_num_batched_tokens=16)
    backend, both = DeviceBackend(rows), [InputBuffers.for_states(states, 16) for _ in range(2)]
    first, second = (prepare_inputs(states, {"a": 3}, buffers, backend=backend) for buffers in both)
    assert_on_the_device(second)
    with pytest.raises(PlanError, match="another step since"):
        _ = first.tensors


def test_a_difference_on_the_device_is_found_by_the_full_check():
    states = make()
    buffers = InputBuffers.for_states(states, 16)
    prepare_inputs(states, {"a": 3}, buffers, backend="device", check="full")
    rows = buffers.attach(DeviceBackend, lambda _: pytest.fail("there are no rows")).rows
    rows.arena[rows.layout.groups[0, 0]] = 6  # another block in the row on the device
    with pytest.raises(PlanError, match=r"another step than the host.*slot_mapping\[0\]"):
        prepare_inputs(states, {"a": 3}, buffers, backend="device", check="full")


def test_a_decode_step_sends_the_tokens_that_it_reads_alone():
    states = make()
    rows = DeviceRows(states, RecordingDevice(), max_num_batched_tokens=64)
    rows.follow_host()
    buffers = InputBuffers.for_states(states, 64)
    sizes = []
    for n in (3, 1, 1, 1):
        batch = prepare_inputs(states, dict.fromkeys("abc", n), buffers)
        slot = rows.send(buffers)
        slot.launched()
        header = layout.PacketHeader(*slot.packet_array[: len(layout.HEADER)].tolist())
        runs = slot.packet_array[header.runs_at :][: 3 * header.num_runs].reshape(-1, 3)
        sizes.append(int(runs[:, 1].sum()))
        states.commit(batch, np.full(3, 7, np.int32))
    assert sizes[1] == 3 * (4 + 4)  # the tokens of this step and of the one before, and four numbers of progress
    assert sizes[2:] == [3 * (4 + 2)] * 2


WITHOUT = """
import sys
from importlib.util import find_spec
from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
assert not {"torch", "triton", "foreword.device"} & set(sys.modules)
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED: raise ModuleNotFoundError(name)
import importlib.util as util
found = util.find_spec
util.find_spec = lambda name, *rest: None if name in BLOCKED else found(name, *rest)
sys.meta_path.insert(0, Blocked())
states = RequestStates(max_num_reqs=1, max_model_len=8, vocab_size=9, kv_groups=[KVGroup(4)])
states.add_request(NewRequest("a", [1], [[1]]))
buffers = InputBuffers.for_states(states, 8)
try:
    prepare_inputs(states, {"a": 1}, buffers, backend="device")
except Exception as error:
    print(type(error).__name__, error)
print(prepare_inputs(states, {"a": 1}, buffers).slot_mapping)
"""


@pytest.mark.parametrize(
    ("blocked", "interpret", "message"),
    [
        ({"torch", "triton"}, "1", "ConfigError backend='device': torch and triton not installed. Install foreword"),
        ({"triton"}, "1", "ConfigError backend='device': triton not installed. Install foreword[torch]"),
        (set(), "0", "ConfigError backend='device': torch finds no GPU; use backend='auto'"),
    ],
)
def test_what_a_device_lacks_is_named_and_other_backends_go_on(blocked, interpret, message):
    if not blocked and torch.cuda.is_available():
        pytest.skip("a machine with a GPU lacks nothing")
    program = f"BLOCKED = {blocked!r}\n{WITHOUT}"
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first.startswith(message)
    assert second == "(array([4]),)"
