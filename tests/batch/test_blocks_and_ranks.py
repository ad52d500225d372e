"""Recurrent states, block operations, prefill context parallelism and the kinds of request, against plain loops."""

from collections import Counter

import numpy as np
import pytest
from batch_rig import every_backend, states_and_buffers, states_of
from batch_scenes import scene

from foreword.batch import (
    InputBuffers,
    KVGroup,
    NewRequest,
    PlanError,
    is_decode,
    prepare_inputs,
    share_prefill,
    split_decodes_and_prefills,
    state_indices,
    uniform_decode_len,
    validate,
)
from foreword.batch.adapters import (
    chunked_local,
    common_attention_metadata,
    dense_inputs,
    nano_vllm_context,
    token_tables,
)
from foreword.batch.features.classify import region_swaps
from foreword.batch.values.block_ops import BlockOps
from foreword.errors import ConfigError

PLAIN = (KVGroup(block_size=4),)


def make(groups=PLAIN, drafts=0, max_num_reqs=8):
    return states_and_buffers(*groups, rows=max_num_reqs, length=64, vocab_size=100, drafts=drafts, tokens=512)


def add(states, rid, prompt, computed=0, outputs=0, extra=0):
    n = prompt + outputs + extra
    blocks = [
        [7 + len(states)] if t.group.recurrent else list(range(1, -(-n // t.tokens_per_block) + 1))
        for t in states.block_tables
    ]
    states.add_request(NewRequest(rid, [1] * prompt, blocks, [2] * outputs, computed))


# -- recurrent states


@every_backend
def test_a_recurrent_group_holds_one_state_per_request_and_has_no_slots(backend):
    states, buffers = make([KVGroup(block_size=4), KVGroup(block_size=4, recurrent=True)])
    add(states, "new", 30)
    add(states, "old", 30, computed=11)
    for pad in (None, (40, 4)):
        batch = prepare_inputs(states, {"old": 5, "new": 30}, buffers, backend=backend, pad_to=pad)
        assert (batch.slot_mapping[1] == -1).all()
        assert (batch.slot_mapping[0][:35] >= 0).all()
        assert batch.block_table[1].shape == (batch.num_reqs_padded, 1)
        validate(batch)
        assert "one state per request" in str(batch.explain(1, token=0))
        got = state_indices(batch, 1)
        assert got.write.tolist() == [8, 7] + [-1] * (batch.num_reqs_padded - 2)
        assert got.read.tolist() == [8, -1] + [-1] * (batch.num_reqs_padded - 2)


@every_backend
def test_the_states_of_drafts_are_the_entries_after_the_first_and_the_accepted_one_is_read(backend):
    states, buffers = make([KVGroup(block_size=4), KVGroup(block_size=4, recurrent=True)], drafts=2)
    states.add_request(NewRequest("a", [1] * 5, [[1, 2, 3, 4], [21, 22, 23]]))
    states.add_request(NewRequest("b", [1] * 5, [[5, 6, 7, 8], [31, 32, 33]]))
    states.commit(prepare_inputs(states, {"a": 5, "b": 5}, buffers, backend=backend), {"a": [2], "b": [2]})
    for accepted in (1, 3, 2):
        drafts = {"a": [2, 2], "b": [2]}
        batch = prepare_inputs(states, {"a": 3, "b": 2}, buffers, draft_tokens=drafts, pad_to=(8, 3), backend=backend)
        got = state_indices(batch, 1)
        assert got.write.tolist() == [21, 31, -1]
        assert got.drafts.tolist() == [[22, 23], [32, -1], [-1, -1]]
        states.commit(batch, {"a": [2] * accepted, "b": [2]})
        batch = prepare_inputs(states, {"a": 1, "b": 1}, buffers, backend=backend)
        assert state_indices(batch, 1).read.tolist() == [20 + accepted, 31]
        states.commit(batch, {"a": [2], "b": [2]})


def test_a_recurrent_group_needs_its_state_block():
    states, buffers = make([KVGroup(block_size=4, recurrent=True)])
    states.add_request(NewRequest("a", [1], [[]]))
    with pytest.raises(PlanError, match="too few blocks"):
        prepare_inputs(states, {"a": 1}, buffers)
    with pytest.raises(ConfigError, match="no window"):
        KVGroup(block_size=4, recurrent=True, sliding_window=8)


def test_states_at_block_borders_are_read_from_one_block_and_written_to_another():
    states, buffers = make(drafts=1)
    states.add_request(NewRequest("a", [1] * 20, [[11, 12, 13, 14, 15]]))
    blocks, seen = [11, 12, 13, 14, 15], []
    for c, n in ((0, 4), (4, 4), (8, 6), (14, 1), (15, 1), (16, 4)):
        got = state_indices(prepare_inputs(states, {"a": n}, buffers))
        assert got.drafts.tolist() == [[-1]]
        seen.append((int(got.read[0]), int(got.write[0])))
        assert seen[-1] == (blocks[(c - 1) // 4] if c else -1, blocks[(c + n - 1) // 4])
        states.commit(prepare_inputs(states, {"a": n}, buffers), {})
    assert seen == [(-1, 11), (11, 12), (12, 14), (14, 14), (14, 14), (14, 15)]


# -- block operations


def test_blocks_are_zeroed_then_copied_and_copies_read_the_old_contents():
    cache = np.arange(1, 9, dtype=np.float32).reshape(8, 1)
    ops = BlockOps.of(zero=[3, 4], copies=[(1, 2), (2, 5), (3, 6)])
    ops.apply(cache)
    assert cache[:, 0].tolist() == [1, 2, 2, 0, 0, 3, 0, 8]


def test_impossible_copies_are_refused():
    with pytest.raises(PlanError, match="null block"):
        BlockOps.of(copies=[(1, 0)])
    with pytest.raises(PlanError, match="two copies"):
        BlockOps.of(copies=[(1, 2), (3, 2)])


# -- prefill context parallelism


def dual_chunk_rank(i, n, size):
    """Which rank computes token i of n: by walking the chunks."""
    length = -(-n // (2 * size))
    chunk = i // length
    return min(chunk, 2 * size - 1 - chunk)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shares_partition_the_step_balance_it_and_restore_its_order(size):
    rng = np.random.default_rng(size)
    for _ in range(25):
        states, buffers = make()
        plan = {}
        for r in range(int(rng.integers(1, 7))):
            prompt = int(rng.integers(1, 60))
            computed = int(rng.integers(0, prompt))
            add(states, str(r), prompt, computed)
            plan[str(r)] = int(rng.integers(1, prompt - computed + 1))
        batch = prepare_inputs(states, plan, buffers)
        T = batch.num_tokens
        shares = [share_prefill(batch, size, rank) for rank in range(size)]
        x = rng.standard_normal(T)
        outputs = np.concatenate([x[s.token_indices] for s in shares])
        for rank, s in enumerate(shares):
            assert np.array_equal(outputs[s.restore_indices], x)
            mine = s.token_indices[: s.num_tokens]
            local = mine - batch.query_start_loc[batch.req_indices[mine]]
            n = batch.num_scheduled_tokens[batch.req_indices[mine]]
            assert [dual_chunk_rank(int(i), int(k), size) for i, k in zip(local, n, strict=True)] == [rank] * len(mine)
            assert s.query_start_loc[-1] == s.num_tokens
            for v in range(
                len(s.req_indices)
            ):  # each row: consecutive positions of one request, all keys before its end
                row = mine[s.query_start_loc[v] : s.query_start_loc[v + 1]]
                assert (batch.req_indices[row] == s.req_indices[v]).all()
                assert np.array_equal(np.diff(batch.positions[row]), np.ones(len(row) - 1))
                assert s.seq_lens[v] == batch.positions[row[-1]] + 1
            assert len(s.token_indices) == max(x.num_tokens for x in shares)
        assert sum(s.num_tokens for s in shares) == T


def test_long_prompts_give_every_rank_the_same_attention_to_do():
    states, buffers = make()
    add(states, "a", 64)
    batch = prepare_inputs(states, {"a": 64}, buffers)
    work = [
        int((batch.positions[s.token_indices[: s.num_tokens]] + 1).sum())
        for s in (share_prefill(batch, 4, r) for r in range(4))
    ]
    assert len(set(work)) == 1


# -- kinds of request


def test_a_chunk_as_long_as_a_verification_is_not_a_decode_and_a_one_token_tail_is():
    states, buffers = make(drafts=3)
    add(states, "verify", 5, computed=6, outputs=2, extra=4)
    add(states, "chunk", 20, computed=8)
    add(states, "tail", 9, computed=8)
    add(states, "padded tail", 9, computed=8, extra=4)
    add(states, "one", 1)
    add(states, "decode", 5, computed=5, outputs=1)
    plan = {"verify": 4, "chunk": 4, "tail": 1, "padded tail": 4, "one": 1, "decode": 1}
    drafts = {"verify": [5, 5, 5], "padded tail": [-1, -1, -1]}
    batch = prepare_inputs(states, plan, buffers, draft_tokens=drafts)
    assert dict(zip(batch.req_ids, is_decode(batch).tolist(), strict=True)) == {
        "verify": True, "chunk": False, "tail": True, "padded tail": True, "one": False, "decode": True,
    }  # fmt: skip

    def uniform(*ids):
        chosen = {r: d for r, d in drafts.items() if r in ids}
        return uniform_decode_len(prepare_inputs(states, {r: plan[r] for r in ids}, buffers, draft_tokens=chosen))

    assert uniform("verify", "padded tail") == 4
    assert uniform("decode", "tail") == 1
    assert uniform("verify", "chunk") is None
    assert uniform("verify", "decode") is None
    assert uniform("one") is None


def test_a_prompt_tail_padded_with_placeholder_drafts_keeps_its_own_token():
    states, buffers = make(drafts=2)
    states.add_request(NewRequest("a", [5, 6, 7], [[1, 2]], num_computed_tokens=2))
    batch = prepare_inputs(states, {"a": 3}, buffers, draft_tokens={"a": [-1, -1]})
    assert batch.input_ids[batch.logits_indices[0]] == 7


def test_splitting_counts_the_leading_short_queries():
    states, buffers = make(drafts=3)
    add(states, "d1", 5, computed=5, outputs=1)
    add(states, "d2", 5, computed=5, outputs=1)
    add(states, "extend", 20, computed=8)
    add(states, "long", 20)
    plan = {"d1": 1, "d2": 1, "extend": 3, "long": 20}
    batch = prepare_inputs(states, plan, buffers)
    assert split_decodes_and_prefills(batch) == (2, 2, 2, 23)
    assert split_decodes_and_prefills(batch, 4) == (3, 1, 5, 20)
    assert split_decodes_and_prefills(batch, 4, require_uniform=True) == (2, 2, 2, 23)
    assert split_decodes_and_prefills(batch, 4, short_extends_are_decodes=False) == (2, 2, 2, 23)
    assert split_decodes_and_prefills(batch, 20) == (4, 0, 25, 0)
    only = prepare_inputs(states, {"long": 20}, buffers)
    assert split_decodes_and_prefills(only) == (0, 1, 0, 20)
    empty = prepare_inputs(states, {}, buffers)
    assert split_decodes_and_prefills(empty) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("plan", "drafts"),
    [
        ((np.array([0], np.int32), np.array([1, 1], np.int32)), None),
        ((np.array([0], np.int32), np.array([[1]], np.int32)), None),
        ((np.array([0], np.int32), np.array([2], np.int32)), np.array([3], np.int32)),
        ((np.array([0], np.int32), np.array([2], np.int32)), np.array([[3], [4]], np.int32)),
    ],
)
def test_decode_first_refuses_arrays_that_do_not_fit_as_any_order_does(plan, drafts):
    states, buffers = make(drafts=3)
    add(states, "a", 5, computed=5, outputs=1, extra=4)
    with pytest.raises(PlanError):
        prepare_inputs(states, plan, buffers, draft_tokens=drafts, order="decode_first")


@pytest.mark.parametrize("seed", range(20))
def test_region_swaps_sort_with_the_fewest_swaps_a_cycle_needs(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        regions = rng.integers(0, 4, rng.integers(0, 12))
        now = regions.copy()
        swaps = region_swaps(regions)
        for i, j in swaps:
            now[[i, j]] = now[[j, i]]
        want = np.sort(regions)
        assert np.array_equal(now, want)
        moved = {i for swap in swaps for i in swap}
        assert moved == set(np.flatnonzero(regions != want).tolist())  # a request in its region stays
        # a cycle of k places takes k − 1 swaps; regions that trade places directly are cycles of two
        pairs = Counter((int(a), int(b)) for a, b in zip(regions, want, strict=True) if a != b)
        direct = sum(min(c, pairs[b, a]) for (a, b), c in pairs.items() if a < b)
        assert len(swaps) <= direct + max(0, sum(pairs.values()) - 2 * direct - 1)


def test_an_idle_step_has_kernel_blocks_of_the_right_width():
    states = states_of(KVGroup(4, kernel_block_size=2), rows=1, length=8)
    batch = prepare_inputs(states, {}, InputBuffers.for_states(states, 8))
    assert batch.kernel_block_table().shape == (0, 4)
    assert common_attention_metadata(batch).block_table_tensor.shape == (0, 4)


def test_forms_for_whole_requests_refuse_a_group_spread_over_ranks():
    batch = scene("context parallel").batch
    for form in (
        lambda: token_tables(batch),
        lambda: nano_vllm_context(batch),
        lambda: dense_inputs(batch),
        lambda: chunked_local(batch, 4),
    ):
        with pytest.raises(PlanError, match="rank"):
            form()
