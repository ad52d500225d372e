"""Steps in flight on the device, packets that do not fit, and what the calls refuse."""

import random

import numpy as np
import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import torch
from device_place import Device, host, to_device
from triton.runtime.interpreter import GridExecutor

from foreword.batch import (
    InputBuffers,
    KVGroup,
    NewRequest,
    PlanError,
    RequestStates,
    SamplingParams,
    advance,
    prepare_inputs,
    resolve,
    stage_mrope_positions,
)
from foreword.device import layout
from foreword.device.backend import DeviceBackend
from foreword.device.recording import RecordingDevice
from foreword.device.rows import DeviceRows, _step_buffers
from foreword.errors import ConfigError

DRAFTS, ROWS, LENGTH, BLOCK = 2, 5, 48, 4


def states_of(**kw) -> RequestStates:
    sizes = {"max_num_reqs": ROWS, "max_model_len": LENGTH, "vocab_size": 90, "kv_groups": [KVGroup(BLOCK)]} | kw
    return RequestStates(**sizes, max_num_draft_tokens=DRAFTS)


def device_of(states: RequestStates, **kw) -> DeviceRows:
    return DeviceRows(states, Device(), max_num_batched_tokens=64, **kw)


@pytest.mark.parametrize("make", [Device, RecordingDevice])
def test_pinned_memory_is_shared_with_its_array_and_memory_of_the_device_has_its_values(make):
    api = make()
    pinned, memory = api.pinned(3), api.zeros((3,), "int32")
    api.to_host(pinned)[:] = (4, 0, 6)
    assert pinned.tolist() == [4, 0, 6]
    api.copy(memory, pinned)
    assert api.to_host(memory).tolist() == [4, 0, 6]


@pytest.mark.parametrize("seed", range(3))
def test_a_step_sent_before_the_samples_are_known_equals_the_resolved_step(seed):
    """Two steps in flight: the device runs step t + 1 from samples that the host learns later. Chunks, drafts that are
    rejected, arrivals, removals, rows used again.
    """
    pick = random.Random(seed)
    states = states_of()
    rows, buffers = device_of(states), [InputBuffers.for_states(states, 64) for _ in range(2)]
    next_block, admitted, compared, unknown = 1, 0, 0, 0
    goals: dict[str, int] = {}
    flight = None  # the batch that ran, its samples
    for step in range(16):
        while len(states) < ROWS and pick.random() < 0.5:
            prompt = [pick.randrange(90) for _ in range(pick.randint(1, 14))]
            goals[f"r{admitted}"] = len(prompt) + pick.randint(3, 16)
            states.add_request(NewRequest(f"r{admitted}", prompt, [[]]))
            admitted += 1
        plan, drafts = {}, {}
        for rid in states.req_ids:
            row = states.row_of(rid)
            known, computed = (
                int(states.num_tokens[row] + states.num_placeholders[row]),
                int(states.num_computed_tokens[row]),
            )
            if known > LENGTH - DRAFTS - 3 or pick.random() < 0.15:
                continue
            n = pick.randint(1, known - computed)
            k = pick.randint(0, DRAFTS) if n == known - computed else 0
            need = -(-(computed + n + k) // BLOCK) - int(states.block_tables[0].num_blocks[row])
            states.append_blocks(rid, [list(range(next_block, next_block + max(need, 0)))])
            next_block += max(need, 0)
            plan[rid], drafts[rid] = n + k, [pick.randrange(90) for _ in range(k)]
        batch = prepare_inputs(states, plan, buffers[step % 2], draft_tokens=drafts)
        rows.send(buffers[step % 2])
        rows.prepare(batch.num_tokens_padded, batch.num_reqs_padded)
        found = rows.read_back(buffers[step % 2])
        unknown += int((batch.num_placeholders > 0).sum())
        samples = np.full((len(plan), 1 + DRAFTS), -1, np.int32)
        arena, place = host(rows.arena), rows.layout
        for b, row in enumerate(batch.idx_mapping.tolist()):
            n, k = int(batch.num_scheduled_tokens[b]), int(batch.num_draft_tokens[b])
            record = arena[place.records_at + row * place.record_size :]
            if record[layout.RECORD.index("num_computed_tokens")] + n - k >= record[layout.RECORD.index("num_tokens")]:
                samples[b, : pick.randint(1, k + 1)] = pick.randrange(90)
        rows.tensors["sampled"][: samples.size] = to_device(samples.ravel())
        rows.commit(batch.num_reqs_padded)
        if flight is not None:  # the host learns what step t sampled
            states.commit(*flight)
            for rid in [r for r in states.req_ids if states.num_tokens[states.row_of(r)] >= goals[r]]:
                states.remove_request(rid)
        live = states.row_generation[batch.idx_mapping] == batch.row_generation
        resolve(batch)
        for b in np.flatnonzero(live).tolist():
            part = slice(int(batch.query_start_loc[b]), int(batch.query_start_loc[b + 1]))
            for name in ("input_ids", "positions"):
                assert found[name][part].tolist() == getattr(batch, name)[part].tolist()
            assert found["slot_mapping"][0][part].tolist() == batch.slot_mapping[0][part].tolist()
            assert found["seq_lens"][b] == batch.seq_lens[b]
            compared += 1
        advance(states, batch)
        flight = batch, samples
    assert compared > 20
    assert unknown > 8


def test_changes_that_exceed_a_packet_are_sent_in_several():
    states = states_of(max_num_reqs=9)
    rows, buffers = device_of(states), InputBuffers.for_states(states, 64)
    assert rows.layout.max_packet < 9 * LENGTH
    for i in range(9):
        blocks = list(range(1 + 12 * i, 13 + 12 * i))
        states.add_request(NewRequest(str(i), list(range(i, i + LENGTH - 1)), [blocks], num_computed_tokens=LENGTH - 2))
    rows.api = Counted()
    batch = prepare_inputs(states, {str(i): 1 for i in range(9)}, buffers)
    rows.send(buffers)
    rows.prepare(9, 9)
    assert rows.api.copies > 1
    rows.check(batch)


def test_packets_of_a_step_leave_the_samples_of_the_step_in_flight_alone():
    states = states_of(max_num_reqs=10)
    rows, buffers = device_of(states), [InputBuffers.for_states(states, 64) for _ in range(2)]
    states.add_request(NewRequest("first", [1, 2, 3], [[200]]))
    prepare_inputs(states, {"first": 3}, buffers[0])
    in_flight = rows.send(buffers[0])
    in_flight.launched()
    before = in_flight.packet_array.copy()
    for i in range(9):
        blocks = list(range(1 + 12 * i, 13 + 12 * i))
        states.add_request(NewRequest(str(i), list(range(i, i + LENGTH - 1)), [blocks], num_computed_tokens=LENGTH - 2))
    batch = prepare_inputs(states, {str(i): 1 for i in range(9)}, buffers[1])
    rows.api = Counted()
    assert rows.send(buffers[1]) is not in_flight
    assert np.array_equal(in_flight.packet_array, before)
    assert rows.api.copies > 1
    rows.prepare(9, 9)
    rows.check(batch)


class Counted(Device):
    copies = 0

    def copy(self, to, source) -> None:
        self.copies += 1
        super().copy(to, source)


def one_step(rows: DeviceRows, buffers: InputBuffers, n: int, *, on_host: bool = True) -> int:
    """A step of n tokens of every request, whose sample is 7. The number of runs in its packet."""
    states = rows.states
    batch = prepare_inputs(states, dict.fromkeys(states.req_ids, n), buffers)
    slot = rows.send(buffers)
    rows.prepare(batch.num_tokens, batch.num_reqs)
    rows.check(batch)
    rows.tensors["sampled"].view(-1, rows.width)[:] = torch.tensor((7, *[-1] * DRAFTS))
    rows.commit(batch.num_reqs)
    if on_host:
        states.commit(batch, np.full(batch.num_reqs, 7, np.int32))
    return int(slot.packet_array[layout.HEADER.index("num_runs")])


def test_a_step_after_one_that_gave_no_token_reads_token_0():
    """The host learns later that its request will end; its token is within the vocabulary until then."""
    states = states_of()
    rows, buffers = device_of(states), [InputBuffers.for_states(states, 64) for _ in range(2)]
    for slot in rows.ring._slots:
        slot.packet_array[:] = 10**9  # left by packets before
    states.add_request(NewRequest("a", [1, 2, 3], [[5]]))
    batch = prepare_inputs(states, {"a": 3}, buffers[0])
    rows.send(buffers[0]).launched()
    rows.prepare(3, 1)
    rows.tensors["sampled"][: rows.width] = torch.tensor((layout.NO_TOKEN, *[-1] * DRAFTS))
    rows.commit(1)
    advance(states, batch)
    prepare_inputs(states, {"a": 1}, buffers[1])
    rows.send(buffers[1])
    rows.prepare(1, 1)
    assert rows.tensors["input_ids"][0] == 0


def test_a_packet_has_the_changes_alone():
    """The runs of a decode step, of one with a new block, and of one after other sampling parameters were set."""
    states = states_of()
    rows, buffers = device_of(states), InputBuffers.for_states(states, 64)
    for i in range(3):
        params = SamplingParams(temperature=0.5 + i, top_p=0.9, seed=(1 << 40) + i)
        states.add_request(NewRequest(str(i), [1, 2, 3 + i], [[2 * i + 1, 2 * i + 2]], sampling_params=params))
    assert one_step(rows, buffers, 3) == 3 * 5  # tokens, progress, sampling, blocks and their number
    record = host(rows.arena)[rows.layout.records_at + states.row_of("2") * rows.layout.record_size :]
    entry = dict(zip(layout.RECORD, record, strict=False))
    floats = np.array([entry["temperature"], entry["top_p"]], np.int32).view(np.float32)
    assert floats.tolist() == [2.5, np.float32(0.9)]
    assert (entry["seed_high"], entry["seed"]) == (1 << 8, 2)
    assert one_step(rows, buffers, 1) == 0
    states.append_blocks("1", [[9]])
    assert one_step(rows, buffers, 1) == 2
    states.sampling.set_columns(np.array([0], np.int32), {"temperature": np.array([3], np.float32)})
    assert one_step(rows, buffers, 1) == 1
    rows.forget()
    assert one_step(rows, buffers, 1) == 3 * 5


def test_a_step_that_only_the_device_committed_is_sent_again():
    """A failure between launch and commit leaves the host where it was; tokens taken back by a scheduler as well."""
    states = states_of()
    rows, buffers = device_of(states), InputBuffers.for_states(states, 64)
    for i in range(2):
        states.add_request(NewRequest(str(i), [1, 2, 3 + i], [[2 * i + 1, 2 * i + 2]]))
    one_step(rows, buffers, 3)
    assert one_step(rows, buffers, 1, on_host=False) == 0
    assert one_step(rows, buffers, 1) == 2 * 2  # tokens and progress
    assert one_step(rows, buffers, 1) == 0
    states._progress.truncate(states.row_of("1"), 4)
    states._progress.set_computed(states.row_of("1"), 2)
    states._progress.truncate(states.row_of("0"), 4)
    states._progress.set_computed(states.row_of("0"), 2)
    assert one_step(rows, buffers, 2) == 2 * 2


def test_outputs_taken_back_after_a_verified_step_are_sent():
    """The progress is one that the step could have left, had it rejected a draft."""
    states = states_of()
    rows, buffers = device_of(states), InputBuffers.for_states(states, 64)
    states.add_request(NewRequest("a", [1, 2, 3], [[1, 2, 3]]))
    one_step(rows, buffers, 3)
    batch = prepare_inputs(states, {"a": 3}, buffers, draft_tokens={"a": [8, 9]})
    rows.send(buffers)
    rows.prepare(3, 1)
    rows.tensors["sampled"][:3] = torch.tensor((8, 9, 10))
    rows.commit(1)
    states.commit(batch, {"a": [8, 9, 10]})
    states._progress.truncate(0, 6)
    states._progress.set_computed(0, 5)
    assert one_step(rows, buffers, 1) == 2
    assert one_step(rows, buffers, 1) == 0


def test_tokens_replaced_in_place_are_sent():
    states = states_of()
    rows, buffers = device_of(states), InputBuffers.for_states(states, 64)
    states.add_request(NewRequest("a", [1, 2, 3, 4], [[1, 2]]))
    one_step(rows, buffers, 2)
    states._progress.write_tokens("a", 0, 2, np.array([8, 9], np.int32))
    assert one_step(rows, buffers, 2) == 2


def test_the_adapter_and_the_rotary_offset_of_a_request_travel_without_sampling_parameters():
    """Requests one after the other in a row, and an offset that is staged after the first step."""
    states = states_of()
    rows, buffers = device_of(states), InputBuffers.for_states(states, 64)
    for rid, lora, delta in (("a", 1, 0), ("b", 2, 5), ("c", 0, 0)):
        states.add_request(NewRequest(rid, [1, 2, 3], [[1, 2]], lora_id=lora, mrope_delta=delta))
        one_step(rows, buffers, 3)  # compares adapters and rotary positions
        assert rows.tensors["lora_tokens"][:3].tolist() == [lora] * 3
        if rid != "c":
            states.remove_request(rid)
    stage_mrope_positions(states, "c", np.zeros((3, 3), np.int32), -2)
    assert one_step(rows, buffers, 1) == 1
    assert rows.tensors["rope_positions"][0] == 3 - 2
    assert one_step(rows, buffers, 1) == 0


def test_buffers_that_the_tensors_do_not_hold_are_refused():
    states = states_of()
    rows, larger = device_of(states), InputBuffers.for_states(states, 65)
    states.add_request(NewRequest("a", [1, 2, 3], [[5]]))
    prepare_inputs(states, {"a": 3}, larger, pad_to=(65, 1))
    with pytest.raises(ConfigError, match="hold steps of 65 tokens, the rows on the device steps of 64"):
        rows.send(larger)
    with pytest.raises(ValueError, match="65 tokens and 1 requests exceeds"):
        rows._core.pack(larger.attach(_step_buffers, _step_buffers), rows.ring._slots[0].packet_array)
    smaller = InputBuffers.for_states(states, 64)
    prepare_inputs(states, {"a": 3}, smaller)
    with pytest.raises(ValueError, match="exceeds"):  # a packet that is too short for the plan
        rows._core.pack(smaller.attach(_step_buffers, _step_buffers), np.zeros(20, np.int32))
    other = states_of()
    with pytest.raises(ConfigError, match="of other states"):
        rows.send(InputBuffers.for_states(other, 8))


@pytest.mark.parametrize("token_table", ["device", "host"])
def test_rows_beyond_2_31_entries_are_read_and_written(token_table, monkeypatch):
    """The last of four rows begins at entry 2.4e9. The memory is virtual but for the pages that are touched, once the
    interpreter does not copy each argument to where it is.
    """
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *arguments: None)
    length = 800_000_000
    states = RequestStates(
        max_num_reqs=4, max_model_len=length, vocab_size=90, kv_groups=[KVGroup(1 << 20)], max_num_draft_tokens=DRAFTS
    )
    rows, buffers = device_of(states, token_table=token_table), InputBuffers.for_states(states, 64)
    for i in range(4):
        states.add_request(NewRequest(str(i), [i, 2, 3], [[i + 1]]))
    one_step(rows, buffers, 3)
    one_step(rows, buffers, 1)
    table = host(rows.tokens)
    assert table[3 * length : 3 * length + 6].tolist() == [3, 2, 3, 7, 7, 0]
    assert table[length : length + 6].tolist() == [1, 2, 3, 7, 7, 0]


def test_large_token_tables_are_in_the_memory_of_the_host_unless_it_is_chosen(monkeypatch):
    def places(**given) -> list[str]:
        device = RecordingDevice()
        DeviceRows(states_of(), device, max_num_batched_tokens=64, **given)
        return [call for call in device.calls if call == "mapped"]

    assert places() == places(token_table="device") == []
    assert places(token_table="host") == ["mapped"]
    monkeypatch.setattr("foreword.device.rows.MOST_DEVICE_TOKENS", ROWS * LENGTH - 1)
    assert places() == ["mapped"]
    assert places(token_table="device") == []


def test_a_token_table_that_does_not_fit_names_the_sizes_and_the_other_place():
    class Small(RecordingDevice):
        def zeros(self, shape, dtype):
            if shape == (ROWS * LENGTH,):
                raise MemoryError
            return super().zeros(shape, dtype)

    with pytest.raises(MemoryError, match=r"max_num_seqs=5, max_model_len=48: .* 960 bytes .* token_table='host'"):
        DeviceRows(states_of(), Small(), max_num_batched_tokens=64)


def test_a_difference_between_device_and_host_is_found():
    states = states_of()
    rows, buffers = device_of(states), InputBuffers.for_states(states, 64)
    states.add_request(NewRequest("a", [1, 2, 3], [[5]]))
    batch = prepare_inputs(states, {"a": 3}, buffers)
    rows.send(buffers)
    rows.prepare(3, 1)
    rows.check(batch)
    rows.tensors["slot_mapping"][0, 1] += 1
    with pytest.raises(PlanError, match=r"slot_mapping\[0\].*21.*22"):
        rows.check(batch)


def test_the_specification_is_proved_of_what_the_device_prepared():
    states = states_of()
    rows, buffers = device_of(states), InputBuffers.for_states(states, 64)
    states.add_request(NewRequest("a", [1, 2, 3], [[5]]))
    batch = prepare_inputs(states, {"a": 3}, buffers, backend=DeviceBackend(rows), check="full")
    assert batch.slot_mapping[0].tolist() == [20, 21, 22]
    rows.arena[rows.layout.groups[0, 0]] = 6  # another block in the row on the device
    with pytest.raises(PlanError, match="expected 5, got 6"):
        prepare_inputs(states, {"a": 3}, buffers, backend=DeviceBackend(rows), check="full")


def test_records_and_tables_that_an_arena_does_not_hold_are_refused():
    states = states_of()
    states.max_num_reqs = 1 << 27  # without the memory of such rows
    with pytest.raises(ConfigError, match="max_model_len"):
        layout.RowLayout.of(states, 64)
