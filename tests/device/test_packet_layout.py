"""The parts of a packet that the native module writes, by the names that the kernels read them with."""

import numpy as np

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs, resolve
from foreword.device.layout import HEADER, HEADER_SIZE, PacketHeader, PlanArrays
from foreword.device.recording import RecordingDevice
from foreword.device.rows import DeviceRows


def test_header_and_plan_of_a_packet_are_the_tensors_of_the_step_by_name():
    """A padded step of a chunk, a decode token, drafts and a cancelled request. Every number of the header differs."""
    states = RequestStates(
        max_num_reqs=7, max_model_len=20, vocab_size=50, kv_groups=[KVGroup(4)], max_num_draft_tokens=3
    )
    buffers = InputBuffers.for_states(states, 24)
    rows = DeviceRows(states, RecordingDevice(), max_num_batched_tokens=24)
    for i in range(5):
        computed = 0 if i == 3 else 3
        states.add_request(NewRequest(str(i), [1, 2, 3, 4], [[2 * i + 1, 2 * i + 2]], num_computed_tokens=computed))
    plan = {"3": 3, "0": 4, "4": 1, "1": 3}
    batch = prepare_inputs(states, plan, buffers, draft_tokens={"0": [7, 8, 9], "1": [5, -1]}, pad_to=(16, 6))
    states.remove_request("4")
    resolve(batch)
    slot = rows.send(buffers)
    header = PacketHeader(*slot.packet_array[: len(HEADER)].tolist())
    scalars = batch.scalars
    for name in set(HEADER) & set(scalars._fields):
        assert getattr(header, name) == getattr(scalars, name), name
    assert header.runs_at == sum(PlanArrays.sizes(header))
    assert header.num_runs > 0
    assert len(set(header)) == len(HEADER), "no entry can be taken for another"
    parts = PlanArrays.of(slot.packet_array, header)
    cancelled = batch.row_generation < 0
    assert cancelled.sum() == 1
    row, B = batch.idx_mapping, batch.num_reqs
    assert not parts.header[len(HEADER) : HEADER_SIZE].any()
    assert parts.rows.tolist() == [*np.where(cancelled, ~row, row).tolist(), 0, 0]
    assert parts.query_start.tolist() == batch.query_start_loc.tolist()
    assert parts.cu_drafts.tolist() == [*batch.cu_num_draft_tokens.tolist(), *[scalars.num_draft_tokens] * (6 - B)]
    assert parts.owner.tolist() == batch.req_indices.tolist()
    assert parts.draft_ids.tolist() == batch.draft_token_ids.tolist()
