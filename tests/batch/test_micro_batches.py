"""A step cut into micro-batches, against plain loops and against the steps that compute the same tokens in turn."""

import numpy as np
import pytest
from batch_rig import every_backend, states_and_buffers

from foreword.batch import KVGroup, NewRequest, PlanError, micro_batches, prepare_inputs

GROUPS = (KVGroup(block_size=4), KVGroup(block_size=4, sliding_window=9))
DRAFTS = 2


def random_states(seed: int):
    """Prompts, chunks over context, and decodes; and a plan for all of them."""
    rng = np.random.default_rng(seed)
    states, buffers = states_and_buffers(*GROUPS, rows=8, length=64, vocab_size=100, drafts=DRAFTS, tokens=512)
    plan, block = {}, 1
    for r in range(int(rng.integers(2, 8))):
        prompt = int(rng.integers(1, 40))
        computed = int(rng.integers(0, prompt))
        blocks = [[block + i for i in range(12)] for _ in GROUPS]
        block += 12
        states.add_request(NewRequest(str(r), rng.integers(0, 100, prompt).tolist(), blocks, (), computed))
        plan[str(r)] = prompt - computed if rng.random() < 0.6 else int(rng.integers(1, prompt - computed + 1))
    return states, buffers, plan


def with_drafts(states, plan, rng):
    """Drafts for some of the requests whose known tokens are all scheduled."""
    drafts = {}
    for rid in plan:
        row = states.row_of(rid)
        count = int(rng.integers(0, DRAFTS + 1))
        if count and states.num_computed_tokens[row] + plan[rid] == states.num_tokens[row]:
            drafts[rid] = rng.integers(0, 100, count).tolist()
            plan[rid] += count
    return drafts


def random_cuts(rng, num_tokens: int) -> list[int]:
    count = int(rng.integers(0, min(4, num_tokens)))
    return sorted(rng.choice(np.arange(1, num_tokens), count, replace=False).tolist())


@every_backend
@pytest.mark.parametrize("pad", [False, True])
def test_a_micro_batch_is_what_its_definition_says(backend, pad):
    for seed in range(20):
        rng = np.random.default_rng(1000 + seed)
        states, buffers, plan = random_states(seed)
        drafts = with_drafts(states, plan, rng)
        batch = prepare_inputs(
            states, plan, buffers, backend=backend, draft_tokens=drafts or None, pad_to=(400, 8) if pad else None
        )
        tokens = [(b, int(batch.query_start_loc[b]) + i) for b, n in enumerate(plan.values()) for i in range(n)]
        cuts = random_cuts(rng, len(tokens))
        found = micro_batches(batch, cuts)
        all_logits = []
        for micro, first, end in zip(found, [0, *cuts], [*cuts, len(tokens)], strict=True):
            inside = [(b, t) for b, t in tokens if first <= t < end]
            requests = sorted({b for b, _ in inside})
            assert (micro.requests, micro.tokens) == (slice(requests[0], requests[-1] + 1), slice(first, end))
            lens = [sum(b == other for b, _ in inside) for other in requests]
            assert micro.query_start_loc.tolist() == np.cumsum([0, *lens]).tolist()
            positions = {b: [int(batch.positions[t]) for other, t in inside if other == b] for b in requests}
            assert micro.num_computed_tokens.tolist() == [positions[b][0] for b in requests]
            assert micro.seq_lens.tolist() == [positions[b][-1] + 1 for b in requests]
            assert (micro.max_query_len, micro.max_seq_len) == (max(lens), max(p[-1] + 1 for p in positions.values()))
            assert (micro.num_reqs, micro.num_tokens) == (len(requests), len(inside))
            logits = [(row, t) for row, t in enumerate(batch.logits_indices.tolist()) if first <= t < end]
            assert micro.logits_indices.tolist() == [t - first for _, t in logits]
            all_logits += list(range(micro.logits.start, micro.logits.stop))
            assert all_logits[len(all_logits) - len(logits) :] == [row for row, _ in logits]
            here = [t for _, t in inside]
            for name in ("input_ids", "positions"):
                assert np.array_equal(getattr(micro, name), getattr(batch, name)[here])
            for g in range(len(GROUPS)):
                assert np.array_equal(micro.slot_mapping[g], batch.slot_mapping[g][here])
                assert np.array_equal(micro.block_table[g], batch.block_table[g][requests])
        assert all_logits == list(range(len(batch.logits_indices)))


@every_backend
def test_micro_batches_are_the_steps_that_compute_their_tokens_one_after_the_other(backend):
    for seed in range(20):
        rng = np.random.default_rng(2000 + seed)
        states, buffers, plan = random_states(seed)
        batch = prepare_inputs(states, plan, buffers, backend=backend)
        starts = batch.query_start_loc.tolist()
        cuts = random_cuts(rng, batch.num_tokens)
        other_states, other_buffers, _ = random_states(seed)
        for micro, first, end in zip(micro_batches(batch, cuts), [0, *cuts], [*cuts, batch.num_tokens], strict=True):
            part = {rid: min(end, starts[b + 1]) - max(first, starts[b]) for b, rid in enumerate(plan)}
            step = prepare_inputs(other_states, {rid: n for rid, n in part.items() if n > 0}, other_buffers)
            for name in ("query_start_loc", "num_computed_tokens", "seq_lens", "input_ids", "positions"):
                assert np.array_equal(getattr(micro, name), getattr(step, name)), name
            assert (micro.max_query_len, micro.max_seq_len) == (step.max_query_len, step.max_seq_len)
            is_cut = (
                end not in starts
            )  # a step has a row of logits for each request, a cut one only after its last token
            assert np.array_equal(micro.logits_indices, step.logits_indices[: len(step.logits_indices) - is_cut])
            for g in range(len(GROUPS)):
                assert np.array_equal(micro.slot_mapping[g], step.slot_mapping[g])
            assert np.array_equal(micro.block_table[0], step.block_table[0])
            other_states.commit(step, {})


def test_a_step_without_gathered_tables_has_micro_batches_without_them():
    states, buffers, plan = random_states(3)
    batch = prepare_inputs(states, plan, buffers, gather_block_tables=False)
    assert [micro.block_table for micro in micro_batches(batch, [1])] == [(), ()]


def test_a_step_without_tokens_has_no_micro_batches():
    states, buffers, _ = random_states(3)
    assert micro_batches(prepare_inputs(states, {}, buffers), []) == []


@pytest.mark.parametrize("cuts", [[0], [-1], [2, 2], [3, 2], [10_000]])
def test_a_cut_that_leaves_a_micro_batch_without_tokens_is_refused(cuts):
    states, buffers, plan = random_states(3)
    batch = prepare_inputs(states, plan, buffers)
    with pytest.raises(PlanError, match="leave a token to each micro-batch"):
        micro_batches(batch, cuts)
