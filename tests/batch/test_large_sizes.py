"""Numbers past 2³¹, memory that is taken as it is used, and sizes that do not fit: right, or refused by name."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from batch_rig import states_and_buffers, states_of

from foreword.batch import (
    ContextParallel,
    InputBatch,
    InputBuffers,
    KVGroup,
    NewRequest,
    PlanError,
    RequestStates,
    kernel_block_table,
    prepare_inputs,
)
from foreword.batch.adapters import (
    ascend_metadata,
    common_attention_metadata,
    dense_inputs,
    flash_attn_varlen,
    flashinfer_plan,
    nano_vllm_context,
    token_tables,
)
from foreword.errors import ConfigError

HIGH = 200_000_000  # a block whose slots, 16 each, are past 2³¹
MOST = 2**31 - 1


def step_of(*blocks: int, kernel_block_size: int | None = None) -> InputBatch:
    states, buffers = states_and_buffers(KVGroup(16, kernel_block_size=kernel_block_size), length=64)
    states.add_request(NewRequest("a", [1] * 20, [blocks]))
    return prepare_inputs(states, {"a": 20}, buffers)


@pytest.mark.parametrize(
    ("form", "slots"),
    [
        (token_tables, lambda form: form.req_to_token[0]),
        (token_tables, lambda form: form.out_cache_loc),
        (dense_inputs, lambda form: form.key_slots[0]),
        (ascend_metadata, lambda form: form.slot_mapping),
        (common_attention_metadata, lambda form: form.slot_mapping),
    ],
)
def test_slots_past_int32_are_right_in_forms_of_int64(form, slots):
    expected = [HIGH * 16 + p if p < 16 else (HIGH + 3) * 16 + p - 16 for p in range(20)]
    assert slots(form(step_of(HIGH, HIGH + 3))).tolist() == expected


def test_slots_past_int32_are_refused_in_a_form_of_int32():
    last = (MOST + 1) // 16 - 1
    assert nano_vllm_context(step_of(1, last)).slot_mapping.tolist()[-1] == last * 16 + 3
    with pytest.raises(PlanError, match=f"int32.*slot_mapping_int32.*at most {MOST}.*got {(last + 1) * 16 + 3}"):
        nano_vllm_context(step_of(1, last + 1))


@pytest.mark.parametrize("form", [kernel_block_table, ascend_metadata, common_attention_metadata])
def test_kernel_blocks_past_int32_are_refused(form):
    last = (MOST + 1) // 4 - 1
    assert kernel_block_table(step_of(1, last, kernel_block_size=4))[0, 4:8].tolist() == [
        MOST - 3 + i for i in range(4)
    ]
    with pytest.raises(PlanError, match=r"int32.*kernel_block_table"):
        form(step_of(1, last + 1, kernel_block_size=4))


@pytest.mark.parametrize(
    ("form", "tensor"),
    [(flash_attn_varlen, "cu_seqlens_k"), (nano_vllm_context, "cu_seqlens_k"), (flashinfer_plan, "")],
)
def test_sums_of_keys_past_int32_are_refused_and_sums_of_pages_are_not(form, tensor):
    rows, length = 2_200, 1_000_000
    states = states_of(KVGroup(1_000_000), rows=rows, length=length)
    buffers = InputBuffers.for_states(states, rows)
    for i in range(rows):
        row = states.add_request(NewRequest(str(i), [1], [[i + 1]]))
        states.num_tokens[row] = states.prefill_len[row] = states.prompt_len[row] = length - 1
        states.num_computed_tokens[row] = length - 2
    plan = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    batch = prepare_inputs(states, (plan[0][:2000], plan[1][:2000]), buffers)
    assert flash_attn_varlen(batch).cu_seqlens_k[-1] == 2000 * (length - 1)
    batch = prepare_inputs(states, plan, buffers)
    if tensor:
        with pytest.raises(PlanError, match=f"int32.*{tensor}.*got {rows * (length - 1)}"):
            form(batch)
    else:
        assert form(batch).kv_last_page_len.tolist() == [length - 1] * rows


# -- memory

RESIDENT = """
import numpy as np
from foreword.batch import *
from foreword.batch.adapters import token_tables

def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) >> 10

R, M = 2048, 131072
states = RequestStates(max_num_reqs=R, max_model_len=M, vocab_size=9, kv_groups=[KVGroup(1024)])
buffers = InputBuffers.for_states(states, 4096)
ids = [str(i) for i in range(R)]
before = resident()
states.add_requests(NewRequests(
    req_ids=ids, token_ids=np.ones(3 * R, np.int32), num_tokens=np.full(R, 3, np.int32),
    block_ids=[np.arange(1, R + 1, dtype=np.int32)], num_blocks=[np.ones(R, np.int32)],
))
print(resident() - before)
batch = prepare_inputs(states, {"0": 3}, buffers)
before = resident()
assert token_tables(batch).req_to_token.tolist() == [[1024, 1025, 1026]]
print(resident() - before)
states.remove_request("0")
before = resident()
for i in range(3):
    states.add_request(NewRequest("embedded", None, [[1]], prompt_embeds=np.ones((3, 4), np.float32)))
    batch = prepare_inputs(states, {"embedded": 3}, buffers)
    assert is_token_ids(batch).sum() == batch.num_tokens_padded - 3
    states.commit(batch, {"embedded": [1]})
    for row in range(R):
        states.swap_rows(row, states.row_of("embedded"))
    states.remove_request("embedded")
assert not states.extras.is_embedding[:, :9].any()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_short_requests_and_optional_tensors_take_the_memory_that_they_use():
    """Rows of 1 GiB, a table of 2 GiB of which a step uses three entries, and a mask of 256 MiB, in MiB."""
    run = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    admitted, table, mask = map(int, run.stdout.split())
    assert admitted < 64
    assert table < 16
    assert mask < 16


# -- sizes


@pytest.mark.parametrize("bad", [0, -1, 2**31, 1.5, True, "9", None])
def test_max_num_batched_tokens_out_of_range_is_refused_by_name(bad):
    with pytest.raises(ConfigError, match=rf"max_num_batched_tokens={bad!r}: must be in \[1, {MOST}\]"):
        InputBuffers.for_states(states_of(), bad)


def test_rows_that_no_machine_holds_are_refused_with_their_parameters():
    sizes = {"max_num_reqs": MOST, "max_model_len": MOST, "vocab_size": 9, "kv_groups": [KVGroup(16)]}
    with pytest.raises(
        ConfigError, match=rf"max_num_reqs={MOST}, max_model_len={MOST}: 16 EiB of memory cannot be had"
    ):
        RequestStates(**sizes)


def test_buffers_that_no_machine_holds_are_refused_with_their_parameters():
    states = states_of()
    states.max_num_reqs = 2**40  # without the memory of such rows
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=16, max_num_reqs=1099511627776.*cannot be had"):
        InputBuffers.for_states(states, 16)


def test_blocks_of_all_ranks_that_exceed_int32_are_refused():
    sizes = {"max_num_reqs": 2, "max_model_len": 64, "vocab_size": 9, "context_parallel": ContextParallel(4, 1)}
    with pytest.raises(ConfigError, match=r"block_size=1073741824.*4 ranks has 4294967296 tokens.*smaller block_size"):
        RequestStates(**sizes, kv_groups=[KVGroup(2**30, context_parallel=True)])
    RequestStates(**sizes, kv_groups=[KVGroup(2**30)])
    with pytest.raises(ConfigError, match=r"size=4, interleave=1073741824.*product.*smaller interleave"):
        ContextParallel(4, 0, 2**30)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: KVGroup(2**31), "block_size=2147483648"),
        (lambda: KVGroup(4, sliding_window=2**31), "sliding_window=2147483648"),
        (lambda: ContextParallel(2**31, 0), "size=2147483648"),
        (lambda: states_of(rows=2**31), "max_num_reqs=2147483648"),
        (lambda: states_of(length=2**31), "max_model_len=2147483648"),
    ],
)
def test_a_size_past_int32_is_refused_with_the_range(make, name):
    with pytest.raises(ConfigError, match=rf"{name}.*in \[1, {MOST}\]"):
        make()
