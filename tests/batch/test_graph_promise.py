"""Promises of captured graphs: a graph reads sizes once, and arrays at fixed addresses in every replay."""

import numpy as np
import pytest
from batch_rig import World, address, every_backend

from foreword.batch import GraphPromise, KVGroup, PaddingBuckets, PlanError, graph_inputs, make_dummy
from foreword.batch.adapters import common_attention_metadata
from foreword.errors import ConfigError

R, M, HEAD = 6, 24, 3


class CapturedAttention:
    """Attention as a graph runs it: sizes were captured, and all else is read from arrays that stay where they are."""

    def __init__(self, promise, inputs, batch, q, cache):
        self.sizes = promise.num_reqs, promise.max_query_len, promise.max_seq_len
        self.arrays = inputs.query_start_loc, inputs.seq_lens, batch.block_table[0], batch.slot_mapping[0], q, cache

    def replay(self):
        (reqs, longest, keys), (loc, seq_lens, table, slots, q, cache) = self.sizes, self.arrays
        for t, slot in enumerate(slots):
            if slot >= 0:
                cache[slot] = q[t]
        out = np.full_like(q, np.nan)
        for b in range(reqs):
            n = loc[b + 1] - loc[b]
            assert n <= longest
            for i in range(longest):
                position = seq_lens[b] - n + i
                seen = [j for j in range(keys) if j <= position and j < seq_lens[b]]
                if i < n and seen:
                    kv = cache[table[b][np.array(seen) // 4] * 4 + np.array(seen) % 4]
                    weights = np.exp(kv @ q[loc[b] + i])
                    out[loc[b] + i] = weights / weights.sum() @ kv
        return out


def plain(kv, q):
    weights = np.exp(kv @ q)
    return weights / weights.sum() @ kv


@pytest.mark.one_in(3)
@every_backend
@pytest.mark.parametrize("is_uniform", [False, True])
@pytest.mark.parametrize("padding", ["empty", "tokens"])
def test_a_graph_of_the_promised_sizes_is_plain_attention_for_every_step_that_keeps_them(backend, is_uniform, padding):
    rng = np.random.default_rng(0)
    promise = GraphPromise(
        num_tokens=15 if is_uniform else 11, num_reqs=5, max_query_len=3, max_seq_len=20, is_uniform=is_uniform
    )
    world = World(KVGroup(4), rows=R, length=M, drafts=2)
    sizes = promise.num_tokens, promise.num_reqs
    q, cache, graph, replayed = np.zeros((promise.num_tokens, HEAD)), np.zeros((600, HEAD)), None, 0
    for _ in range(40):
        for rid in world.states.req_ids:
            world.states.remove_request(rid)
        world.next_block, keys, plan = 1, {}, {}
        for rid in map(str, range(int(rng.integers(1, 7)))):
            n, computed = 3 if is_uniform else int(rng.integers(1, 5)), int(rng.integers(0, 19))
            world.add(rid, rng.integers(0, 50, computed + n).tolist(), num_computed_tokens=computed)
            keys[rid], plan[rid] = rng.standard_normal((computed + n, HEAD)), n
            table = world.states.block_tables[0].table[world.states.row_of(rid)]
            for p in range(computed):
                cache[table[p // 4] * 4 + p % 4] = keys[rid][p]
        lens = np.array([len(keys[rid]) for rid in plan])
        num_scheduled = np.array(list(plan.values()))
        keeps = (
            len(plan) <= 5
            and num_scheduled.sum() <= promise.num_tokens
            and num_scheduled.max() <= 3
            and lens.max() <= 20
        )
        assert (promise.broken_by(num_scheduled, lens) is None) == keeps
        if not keeps:
            with pytest.raises(PlanError, match="breaks what the graph was promised"):
                graph_inputs(world.prepare(plan, backend=backend), promise)
            continue
        if graph is None:
            dummy = make_dummy(world.states, world.buffers, num_tokens=sizes[0], num_reqs=sizes[1])
            graph = CapturedAttention(promise, graph_inputs(dummy, promise, padding_requests=padding), dummy, q, cache)
        batch = world.prepare(plan, backend=backend, pad_to=sizes)
        if padding == "tokens" and batch.num_tokens + (5 - len(plan)) * 3 < sizes[0]:
            with pytest.raises(PlanError, match="cannot hold the tokens of padding"):
                graph_inputs(batch, promise, padding_requests=padding)
            continue
        inputs = graph_inputs(batch, promise, padding_requests=padding)
        loc = [0]
        for b in range(5):
            n = list(plan.values())[b] if b < len(plan) else min(3, sizes[0] - loc[-1]) if padding == "tokens" else 0
            loc.append(loc[-1] + n)
        assert inputs.query_start_loc.tolist() == loc
        assert inputs.seq_lens.tolist() == [*lens, *[0] * (5 - len(plan))]
        assert (inputs.max_query_len, inputs.max_seq_len) == (3, 20)
        assert address(inputs.query_start_loc) == address(graph.arrays[0])
        owners = [(rid, len(keys[rid]) - n + i) for rid, n in plan.items() for i in range(n)]
        q[: len(owners)] = [keys[rid][p] for rid, p in owners]
        want = [plain(keys[rid][: p + 1], keys[rid][p]) for rid, p in owners]
        assert np.allclose(graph.replay()[: len(owners)], want)
        replayed += 1
    assert replayed > 5


def test_a_graph_of_uniform_decodes_takes_the_sizes_of_its_bucket():
    buckets = PaddingBuckets.up_to(16, max_num_reqs=8)
    for tokens, reqs in buckets.graphs(2):
        GraphPromise(num_tokens=tokens, num_reqs=reqs, max_query_len=2, max_seq_len=M, is_uniform=True)


def step(plan, computed, promise, **how):
    world = World(KVGroup(4), rows=R, length=M)
    for rid, n in plan.items():
        world.add(rid, [1] * (computed + n), num_computed_tokens=computed)
    return world.prepare(plan, **{"pad_to": (promise.num_tokens, promise.num_reqs)} | how)


def test_the_rule_that_a_step_breaks_is_named_with_its_request():
    promise = GraphPromise(num_tokens=6, num_reqs=3, max_query_len=2, max_seq_len=9, is_uniform=True)
    for plan, computed, tensor, request, expected, got in (
        ({"a": 2, "b": 1}, 3, "num_scheduled_tokens", "b", "2", 1),
        ({"a": 3}, 3, "num_scheduled_tokens", "a", "2", 3),
        ({"a": 2}, 8, "seq_lens", "a", "at most 9", 10),
        ({"a": 2, "b": 2, "c": 2, "d": 2}, 1, "num_reqs", None, "at most 3", 4),
        ({"a": 4, "b": 3}, 1, "num_tokens", None, "at most 6", 7),
    ):
        with pytest.raises(PlanError, match="promised") as caught:
            graph_inputs(step(plan, computed, promise, pad_to=None), promise)
        error = caught.value
        assert (error.tensor, error.request, error.expected, error.got) == (tensor, request, expected, got)


def test_a_step_padded_to_other_sizes_is_refused_with_the_sizes():
    promise = GraphPromise(num_tokens=6, num_reqs=3, max_query_len=2, max_seq_len=9)
    with pytest.raises(PlanError, match="pass them as pad_to") as caught:
        graph_inputs(step({"a": 2}, 1, promise, pad_to=(6, 2)), promise)
    assert (caught.value.expected, caught.value.got) == ((6, 3), (6, 2))


def test_attention_metadata_for_a_graph_has_the_promised_lengths():
    promise = GraphPromise(num_tokens=6, num_reqs=3, max_query_len=4, max_seq_len=20)
    common = common_attention_metadata(step({"a": 2}, 1, promise), promise=promise)
    assert (common.max_query_len, common.max_seq_len) == (4, 20)
    with pytest.raises(PlanError, match="promised"):
        common_attention_metadata(step({"a": 5}, 1, promise), promise=promise)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_tokens": 0},
        {"num_tokens": 2},
        {"num_tokens": 7},
        {"num_tokens": 5, "is_uniform": True},
        {"max_seq_len": 1},
        {"max_query_len": 1.5},
        {"num_reqs": True},
    ],
)
def test_a_promise_that_no_step_keeps_is_refused(sizes):
    with pytest.raises(ConfigError, match="GraphPromise"):
        GraphPromise(**{"num_tokens": 6, "num_reqs": 3, "max_query_len": 2, "max_seq_len": 9} | sizes)
