"""Steps that compute nothing (dummies) have tensors as defined, and do not change the states."""

import random

import numpy as np
import pytest
from batch_rig import arrays, every_backend, states_and_buffers, tensors

from foreword.batch import (
    AttentionState,
    ContextParallel,
    InputBatch,
    InputBuffers,
    KVGroup,
    NewRequest,
    PlanError,
    RequestStates,
    is_decode,
    make_dummy,
    prepare_inputs,
    uniform_decode_len,
)
from foreword.batch.step.layout import STEP
from foreword.errors import CapacityError

R, M, T, D = 6, 24, 32, 3
GROUPS = [KVGroup(4), KVGroup(2, sliding_window=5)]


def make(*groups: KVGroup, **settings) -> tuple[RequestStates, InputBuffers]:
    states, buffers = states_and_buffers(*groups or GROUPS, rows=R, length=M, drafts=D, tokens=T, **settings)
    for i in range(3):
        blocks = [list(range(10 * i + 10, 10 * i + 10 + t.width - i)) for t in states.block_tables]
        states.add_request(NewRequest(str(i), [3 + i] * (5 + i), blocks, num_computed_tokens=i))
    return states, buffers


def memory(buffers: InputBuffers) -> dict[str, list]:
    """Every buffer whose entries past a step's own have a value, to its end."""
    return {f.name: [a.tolist() for a in arrays(buffers[f.name])] for f in STEP if f.padding not in (None, "T")}


def check(
    batch: InputBatch, counts: list[int], computed: int, drafts: int, block: int, padded: tuple[int, int]
) -> None:
    """Every tensor of a dummy, from one loop over its tokens."""
    states, B, N = batch.states, len(counts), sum(counts)
    null, (Tp, Bp) = states.null_block, padded
    starts = [sum(counts[:b]) for b in range(B + 1)]
    logits = [starts[b + 1] - drafts - 1 + j for b in range(B) for j in range(drafts + 1)]
    want = {
        "num_scheduled_tokens": counts,
        "num_draft_tokens": [drafts] * B,
        "num_computed_tokens": [computed] * B,
        "is_prefilling": [False] * B,
        "row_generation": [-1] * B,
        "query_start_loc": starts + [N] * (Bp - B),
        "seq_lens": [computed + n for n in counts] + [0] * (Bp - B),
        "req_indices": [b for b, n in enumerate(counts) for _ in range(n)],
        "positions": [computed + i for n in counts for i in range(n)] + [0] * (Tp - N),
        "input_ids": [0] * Tp,
        "cu_num_logits": [b * (1 + drafts) for b in range(B + 1)],
        "cu_num_draft_tokens": [b * drafts for b in range(B + 1)],
        "logits_indices": logits,
        "expanded_local_pos": [j for _ in range(B) for j in range(drafts + 1)],
        "target_logits_indices": [i for i in range(len(logits)) if i % (drafts + 1) < drafts],
        "bonus_logits_indices": [i for i in range(len(logits)) if i % (drafts + 1) == drafts],
        "draft_token_ids": [-1] * (B * drafts),
    }
    assert {name: getattr(batch, name).tolist() for name in want} == want
    for g, table in enumerate(states.block_tables):
        assert (batch.buffers["slot_mapping"][g] == -1).all()
        rows = [[block if k * table.tokens_per_block < computed + n and computed else null for k in range(table.width)]
                for n in counts]  # fmt: skip
        assert batch.block_table[g].tolist() == rows + [[null] * table.width] * (Bp - B)
    numbers = (batch.num_reqs, batch.num_tokens, batch.num_reqs_padded, batch.num_tokens_padded, batch.max_query_len,
               batch.max_seq_len)  # fmt: skip
    assert numbers == (B, N, Bp, Tp, max(counts), computed + max(counts))
    if drafts:
        state = AttentionState.SPEC_DECODING
    elif max(counts) == 1:
        state = AttentionState.DECODE_ONLY
    else:
        state = AttentionState.CHUNKED_PREFILL if computed else AttentionState.PREFILL_NO_CACHE
    assert batch.attention_state is state
    assert batch.req_ids == [f"dummy {b}" for b in range(B)]


@pytest.mark.parametrize("null", [0, -1])
def test_every_tensor_of_random_dummies_is_its_definition(null):
    states, buffers = make(null_block=null)
    rng = random.Random(3)
    for _ in range(150):
        reqs = rng.randint(1, R)
        tokens = rng.randint(reqs, T)
        each, more = divmod(tokens, reqs)
        counts = [each] * (reqs - more) + [each + 1] * more
        if max(counts) > M:
            continue
        computed = rng.choice([0, rng.randint(0, M - max(counts))])
        drafts = rng.choice([0, rng.randint(0, min(D, each - 1))])
        block = rng.choice([null, 9] if null == 0 else [0, 9])
        pads = rng.choice([None, rng.randint(tokens, T)]), rng.choice([None, rng.randint(reqs, R)])
        batch = make_dummy(
            states, buffers, num_tokens=tokens, num_reqs=reqs, num_computed=computed, num_drafts=drafts,
            context_block=block, pad_to=pads,
        )  # fmt: skip
        check(batch, counts, computed, drafts, block, (pads[0] or tokens, pads[1] or reqs))


@pytest.mark.parametrize("padding", [None, (6, 5)])
def test_a_dummy_of_one_token_over_context_is_a_decode(padding):
    states, buffers = make()
    batch = make_dummy(
        states, buffers, num_tokens=4, num_reqs=4, num_computed=7, context_block=9, pad_to=padding
    )  # fmt: skip
    assert batch.attention_state is AttentionState.DECODE_ONLY
    assert is_decode(batch).tolist() == [True] * 4
    assert uniform_decode_len(batch) == 1
    check(batch, [1] * 4, 7, 0, 9, padding or (4, 4))


def test_a_dummy_with_drafts_over_context_is_a_verification():
    states, buffers = make()
    batch = make_dummy(states, buffers, num_tokens=9, num_reqs=3, num_computed=6, num_drafts=2, context_block=9)
    assert batch.attention_state is AttentionState.SPEC_DECODING
    assert is_decode(batch).all()
    assert uniform_decode_len(batch) == 3
    check(batch, [3] * 3, 6, 2, 9, (9, 3))


def test_a_rank_has_its_share_of_a_dummys_context():
    cp = ContextParallel(size=2, rank=1, interleave=2)
    states, buffers = make(KVGroup(4, context_parallel=True), context_parallel=cp)
    batch = make_dummy(states, buffers, num_tokens=3, num_reqs=3, num_computed=6, context_block=9, pad_to=(4, 4))
    here = sum(p // 2 % 2 == 1 for p in range(7))
    assert batch.dcp_local_seq_lens.tolist() == [here] * 3 + [0]
    check(batch, [1] * 3, 6, 0, 9, (4, 4))


def test_without_block_tables_a_dummy_has_none():
    states, buffers = make()
    batch = make_dummy(states, buffers, num_tokens=2, num_reqs=2, num_computed=3, gather_block_tables=False)
    assert not batch.is_gathered
    assert batch.seq_lens.tolist() == [4, 4]
    for g in range(len(GROUPS)):
        assert (buffers["block_table"][g] == 0).all()


# -- what it leaves alone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("null", [0, -1])
def test_a_dummy_reads_no_live_block_and_changes_no_row(null):
    states, buffers = make(null_block=null)
    before = [a.copy() for a in (*states._row_arrays(), states.token_ids)]
    step, requests = states._step, states.req_ids
    for context in (0, 8):
        batch = make_dummy(states, buffers, num_tokens=8, num_reqs=4, num_computed=context, context_block=9)
        for table in batch.block_table:
            assert set(np.unique(table)) <= {null, 9}
        with pytest.raises(PlanError, match="committed"):
            states.commit(batch, np.zeros(4, np.int32))
    for array, was in zip((*states._row_arrays(), states.token_ids), before, strict=True):
        assert np.array_equal(array, was)
    assert (states._step, states.req_ids) == (step, requests)


@every_backend
@pytest.mark.parametrize("context", [0, 5])
@pytest.mark.parametrize("gather", [False, True])
def test_a_step_after_a_dummy_is_as_in_new_buffers(backend, context, gather):
    states, buffers = make()
    plans = [
        ({"0": 7, "2": 3}, {"0": [1, 2]}, (12, 4)),
        ({"1": 2}, None, None),
        ({"2": 5, "0": 1, "1": 5}, None, (20, 5)),
    ]
    for plan, drafts, pads in plans:
        make_dummy(
            states, buffers, num_tokens=17, num_reqs=5, num_computed=context, num_drafts=2, context_block=9,
            pad_to=(24, 6), gather_block_tables=gather,
        )  # fmt: skip
        fresh = InputBuffers.for_states(states, T)
        again, first = (
            prepare_inputs(states, plan, b, draft_tokens=drafts, pad_to=pads, backend=backend) for b in (buffers, fresh)
        )
        assert tensors(again) == tensors(first)
        got, want = memory(buffers), memory(fresh)
        for name in want:
            if name not in ("num_blocks", "content_id"):  # what the gather remembers of the rows it wrote
                assert got[name] == want[name], name


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_context_needs_a_block_where_no_block_is_reserved():
    states, buffers = make(null_block=-1)
    with pytest.raises(PlanError, match="context"):
        make_dummy(states, buffers, num_tokens=2, num_reqs=2, num_computed=1)
    batch = make_dummy(states, buffers, num_tokens=2, num_reqs=2, num_computed=1, context_block=0)
    check(batch, [1, 1], 1, 0, 0, (2, 2))
    batch = make_dummy(states, buffers, num_tokens=2, num_reqs=2)
    check(batch, [1, 1], 0, 0, -1, (2, 2))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"num_reqs": 0}, PlanError, "at least one token"),
        ({"num_tokens": 1}, PlanError, "at least one token"),
        ({"num_reqs": R + 1, "num_tokens": R + 1}, CapacityError, "requests"),
        ({"num_tokens": T + 1, "num_reqs": 6}, CapacityError, "tokens"),
        ({"num_computed": M}, PlanError, "max_model_len"),
        ({"num_computed": -1}, PlanError, "max_model_len"),
        ({"num_drafts": 1}, PlanError, "drafts"),
        ({"num_tokens": 20, "num_drafts": D + 1}, PlanError, "drafts"),
        ({"num_drafts": -1}, PlanError, "drafts"),
        ({"pad_to": (1, None)}, PlanError, "pad_to"),
        ({"pad_to": (None, R + 1)}, PlanError, "pad_to"),
    ],
)
def test_a_dummy_that_cannot_be_is_refused(changes, error, said):
    states, buffers = make()
    real = prepare_inputs(states, {"0": 2}, buffers)
    before = real.input_ids.tolist()
    with pytest.raises(error, match=said):
        make_dummy(states, buffers, **{"num_tokens": 2, "num_reqs": 2} | changes)
    assert real.input_ids.tolist() == before
