"""Ranges of a prompt in which tokens see each other, against a loop over queries and keys."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from batch_rig import address, every_backend, states_and_buffers
from test_vllm_apply import new_data, output

from foreword.batch import (
    DifferenceRecorder,
    KVGroup,
    MultiModalFeature,
    NewRequest,
    PlanError,
    RequestError,
    StepDifference,
    apply_difference,
    attention_mask,
    bidirectional_ranges,
    micro_batches,
    prepare_inputs,
    share_prefill,
    validate,
)
from foreword.batch.adapters import (
    ascend_metadata,
    chunked_local,
    common_attention_metadata,
    dense_inputs,
    nano_vllm_context,
)
from foreword.batch.adapters.vllm import VllmAdapter, apply
from foreword.batch.adapters.vllm_preempted import preempt, resume

GROUPS = (KVGroup(4), KVGroup(2, sliding_window=5))


def make(groups=GROUPS, **settings):
    return states_and_buffers(*groups, **{"rows": 6, "length": 40, "vocab_size": 100, "tokens": 200} | settings)


def blocks(first, groups=GROUPS, length=40):
    return [list(range(first * length + 1, first * length + 1 + length // g.block_size)) for g in groups]


def random_ranges(rng, length):
    """Ascending ranges, some of which touch."""
    borders = np.sort(rng.choice(length + 1, 2 * int(rng.integers(0, min(4, (length + 1) // 2) + 1)), replace=False))
    ranges = borders.reshape(-1, 2).tolist()
    return [(a, b) for a, b in ranges] + ([(ranges[-1][1], length)] if ranges and ranges[-1][1] < length else [])


def sees(p, j, window, ranges):
    """The definition: whether the query at position p sees the key at position j."""
    if any(start <= p < stop and start <= j < stop for start, stop in ranges):
        return True
    return j <= p and (window is None or j > p - window)


def allowed_ends(ranges, computed, length):
    """Where a step may end: after ``computed``, and inside no range."""
    return [e for e in range(computed + 1, length + 1) if not any(start < e < stop for start, stop in ranges)]


@pytest.mark.one_in(3)
@every_backend
def test_masks_of_prompts_in_any_chunks_are_what_the_loop_says(backend):
    rng, seen = np.random.default_rng(0), 0
    for _ in range(5):
        states, buffers = make()
        prompts = {}
        for i in range(int(rng.integers(1, 5))):
            length = int(rng.integers(1, 24))
            prompts[str(i)] = ranges = random_ranges(rng, length)
            ids = rng.integers(0, 100, length)
            states.add_request(NewRequest(str(i), ids, blocks(i), bidirectional_ranges=ranges))
        while True:
            computed = {r: int(states.num_computed_tokens[states.row_of(r)]) for r in prompts}
            plan = {}
            for rid in rng.permutation(list(prompts)).tolist():
                known = int(states.num_tokens[states.row_of(rid)])
                ends = allowed_ends(prompts[rid], computed[rid], known)
                if ends and known <= 26:
                    plan[rid] = int(rng.choice(ends)) - computed[rid]
            if not plan:
                break
            tokens = sum(plan.values())
            batch = prepare_inputs(states, plan, buffers, backend=backend, pad_to=(tokens + 3, 6))
            validate(batch)
            queries = [(rid, computed[rid] + i) for rid, n in plan.items() for i in range(n)]
            inside = [[(a, b) for a, b in prompts[rid] if a <= p < b] for rid, p in queries]
            found = bidirectional_ranges(batch)
            if found is None:
                assert not any(inside)
            else:
                seen += 1
                assert found.tolist() == [list(r[0]) if r else [0, 0] for r in inside] + [[0, 0]] * 3
            for g, group in enumerate(GROUPS):
                want = [
                    [sees(p, j, group.sliding_window, prompts[rid]) for j in range(batch.max_seq_len)]
                    for rid, p in queries
                ]
                dense = dense_inputs(batch, g).mask
                rows = [dense[b, i] for b, n in enumerate(plan.values()) for i in range(n)]
                assert np.array_equal(rows, want)
                mask = attention_mask(batch, g)
                if found is not None and mask is not None:
                    assert np.array_equal(mask, want)
            told = common_attention_metadata(batch).mm_req_doc_ranges or {}
            assert told == {
                b: here
                for b, (rid, n) in enumerate(plan.items())
                if (
                    here := [
                        (start, stop - 1)
                        for start, stop in prompts[rid]
                        if stop > computed[rid] and start < computed[rid] + n
                    ]
                )
            }
            states.commit(batch, {rid: [7] for rid in plan})
    assert seen > 10


def one(ranges=((2, 6),), length=10, computed=0, groups=GROUPS[:1]):
    states, buffers = make(groups)
    ids = list(range(length))
    request = NewRequest("a", ids, blocks(0, groups), (), computed, bidirectional_ranges=ranges)
    states.add_request(request)
    return states, buffers


@pytest.mark.parametrize("end", [3, 4, 5])
def test_a_step_that_ends_inside_a_range_is_refused_with_the_borders(end):
    states, buffers = one()
    batch = prepare_inputs(states, {"a": end}, buffers)
    with pytest.raises(PlanError, match="ends inside a bidirectional range") as caught:
        bidirectional_ranges(batch)
    assert (caught.value.request, caught.value.expected, caught.value.got) == ("a", "not in 3 … 5", end)
    with pytest.raises(PlanError, match="ends inside"):
        validate(batch)


@pytest.mark.parametrize("end", [2, 6, 7])
def test_a_step_may_end_at_the_borders_of_a_range(end):
    states, buffers = one()
    batch = prepare_inputs(states, {"a": end}, buffers)
    assert (bidirectional_ranges(batch) is not None) == (end > 2)


def test_a_cached_prefix_may_end_inside_a_range_until_a_window_has_passed_its_start():
    states, buffers = one(computed=4)
    assert bidirectional_ranges(prepare_inputs(states, {"a": 6}, buffers)).tolist() == [[2, 6]] * 2 + [[0, 0]] * 4
    for window, is_refused in ((2, True), (3, False)):
        states, buffers = one(computed=4, groups=(KVGroup(4, sliding_window=window),))
        batch = prepare_inputs(states, {"a": 6}, buffers)
        if is_refused:
            with pytest.raises(PlanError, match="start is below the sliding window"):
                bidirectional_ranges(batch)
        else:
            assert bidirectional_ranges(batch) is not None


@pytest.mark.parametrize(
    "ranges",
    [[(3, 3)], [(4, 2)], [(-1, 2)], [(0, 11)], [(0, 4), (3, 6)], [(4, 6), (0, 2)], [1, 2], [(1, 2, 3)], 5, "ab",
     [(1.5, 3)], [(2**31 - 1, -(2**31))], [(0, 2), (3,)]],
)  # fmt: skip
def test_ranges_that_are_not_ascending_positions_of_the_prompt_are_refused(ranges):
    states, _ = make()
    with pytest.raises(RequestError, match="bidirectional_ranges"):
        states.add_request(NewRequest("a", list(range(10)), blocks(0), bidirectional_ranges=ranges))
    assert len(states) == len(states.extras) == 0


@pytest.mark.parametrize(
    "form",
    [ascend_metadata, nano_vllm_context, lambda b: chunked_local(b, 8), lambda b: share_prefill(b, 2, 0)],
    ids=["ascend_metadata", "nano_vllm_context", "chunked_local", "share_prefill"],
)
def test_forms_for_causal_kernels_refuse_a_step_with_ranges_and_take_the_next_one(form):
    states, buffers = one()
    batch = prepare_inputs(states, {"a": 6}, buffers)
    with pytest.raises(PlanError, match="without bidirectional ranges"):
        form(batch)
    states.commit(batch, {})
    form(prepare_inputs(states, {"a": 4}, buffers))


@pytest.mark.parametrize("none", [(), [], np.zeros((0, 2), np.int64)], ids=["tuple", "list", "array"])
def test_no_ranges_of_any_type_are_none(none):
    states, buffers = one(none)
    assert len(states.extras) == 0
    assert bidirectional_ranges(prepare_inputs(states, {"a": 6}, buffers)) is None


def test_micro_batches_are_cut_at_the_borders_of_ranges_only():
    states, buffers = one(ranges=[(2, 5), (5, 8)])
    states.add_request(NewRequest("b", [1, 2, 3], blocks(1, (KVGroup(4),)), bidirectional_ranges=[(0, 3)]))
    batch = prepare_inputs(states, {"a": 10, "b": 3}, buffers)
    for cut in range(1, 13):
        if cut in (3, 4, 6, 7, 11, 12):
            with pytest.raises(PlanError, match="a cut inside"):
                micro_batches(batch, [cut])
        else:
            assert len(micro_batches(batch, [cut])) == 2


def test_ranges_follow_their_request_when_rows_are_exchanged_freed_and_given_again():
    states, buffers = make()
    states.add_request(NewRequest("a", list(range(6)), blocks(0), bidirectional_ranges=[(1, 4)]))
    states.add_request(NewRequest("b", list(range(6)), blocks(1)))
    states.swap_rows(states.row_of("a"), states.row_of("b"))
    want = [[0, 0], [1, 4], [1, 4], [1, 4], [0, 0], [0, 0]]
    batch = prepare_inputs(states, {"b": 6, "a": 6}, buffers)
    assert bidirectional_ranges(batch).tolist() == [[0, 0]] * 6 + want
    kept = preempt(states, "a")
    states.add_request(NewRequest("c", list(range(6)), blocks(2)))
    assert bidirectional_ranges(prepare_inputs(states, {"c": 6, "b": 6}, buffers)) is None
    resume(states, kept, blocks(3), 0)
    assert bidirectional_ranges(prepare_inputs(states, {"a": 6}, buffers)).tolist() == want


def test_ranges_are_part_of_a_step_difference():
    states, buffers = one()
    recorder = DifferenceRecorder(states)
    value = StepDifference.from_bytes(recorder.take(prepare_inputs(states, {"a": 10}, buffers)).to_bytes())
    other, other_buffers = make((KVGroup(4),))
    batch = apply_difference(other, value, other_buffers)
    assert bidirectional_ranges(batch).tolist() == [[0, 0]] * 2 + [[2, 6]] * 4 + [[0, 0]] * 4


def test_images_of_a_vllm_scheduler_see_themselves_where_the_adapter_was_told_so():
    def feature(modality, offset, length, is_embed=None):
        place = SimpleNamespace(offset=offset, length=length, is_embed=is_embed)
        return SimpleNamespace(identifier=modality, modality=modality, mm_position=place)

    features = [feature("image", 1, 4, [True, True, False, True]), feature("audio", 5, 2), feature("video", 7, 2)]
    for told, ranges in (((), None), (("image", "video"), [(1, 3), (4, 5), (7, 9)])):
        states, buffers = make((KVGroup(4),))
        VllmAdapter.of(states).bidirectional = told
        new = new_data("a", list(range(10)), ([1, 2, 3],), mm_features=features)
        applied = apply(states, output([new], scheduled={"a": 10}))
        common = common_attention_metadata(prepare_inputs(states, applied, buffers))
        assert common.mm_req_doc_ranges == (ranges and {0: [(start, stop - 1) for start, stop in ranges]})


def test_the_ranges_are_at_one_address():
    states, buffers = one()
    first = address(bidirectional_ranges(prepare_inputs(states, {"a": 6}, buffers)))
    assert address(bidirectional_ranges(prepare_inputs(states, {"a": 10}, buffers))) == first


def test_the_runs_of_embedded_positions_of_a_feature_are_its_ranges():
    rng = np.random.default_rng(1)
    for _ in range(50):
        length, offset = int(rng.integers(1, 12)), int(rng.integers(0, 5))
        is_embed = rng.random(length) < 0.6
        found = MultiModalFeature("x", offset, length, is_embed).embedded_ranges
        positions = [p for start, stop in found for p in range(start, stop)]
        assert positions == (offset + np.flatnonzero(is_embed)).tolist()
        assert all(a[1] < b[0] for a, b in pairwise(found))
    assert MultiModalFeature("x", 3, 4).embedded_ranges == [(3, 7)]
