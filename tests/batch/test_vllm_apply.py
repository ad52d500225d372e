"""vLLM's scheduler output applied: random schedules against a dictionary of requests, and the protocol's rules."""

import pickle
import tracemalloc
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from batch_rig import states_and_buffers

from foreword.batch import (
    CapacityError,
    InputBuffers,
    KVGroup,
    NewRequest,
    PlanError,
    RequestError,
    advance,
    lora_mapping,
    mm_inputs,
    pooling_metadata,
    prepare_inputs,
    prompt_embeds,
    resolve,
    sampling_metadata,
)
from foreword.batch.adapters import vllm_front
from foreword.batch.adapters.vllm import VllmAdapter, apply
from foreword.batch.state.sampling_columns import COLUMNS

GROUPS = [KVGroup(block_size=4), KVGroup(block_size=2)]
DRAFTS = 3


def new_data(rid, prompt, blocks, **kw):
    return SimpleNamespace(
        **{
            "req_id": rid, "prompt_token_ids": prompt, "mm_features": [], "sampling_params": None,
            "pooling_params": None, "block_ids": blocks, "num_computed_tokens": 0, "lora_request": None,
            "prompt_embeds": None, "prefill_token_ids": None,
        }
        | kw
    )  # fmt: skip


def cached_data(entries=(), resumed=(), all_token_ids=None):
    """entries: (req_id, new blocks or None, num_computed_tokens, num_output_tokens)"""
    return SimpleNamespace(
        req_ids=[e[0] for e in entries],
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids=all_token_ids or {},
        new_block_ids=[e[1] for e in entries],
        num_computed_tokens=[e[2] for e in entries],
        num_output_tokens=[e[3] for e in entries],
    )


def output(new=(), cached=None, scheduled=None, drafts=None, finished=(), preempted=(), **kw):
    scheduled = scheduled or {}
    return SimpleNamespace(
        **{
            "scheduled_new_reqs": list(new),
            "scheduled_cached_reqs": cached or cached_data(),
            "num_scheduled_tokens": scheduled,
            "total_num_scheduled_tokens": sum(scheduled.values()),
            "scheduled_spec_decode_tokens": drafts or {},
            "scheduled_encoder_inputs": {},
            "num_common_prefix_blocks": [],
            "finished_req_ids": set(finished),
            "free_encoder_mm_hashes": [],
            "preempted_req_ids": set(preempted),
        }
        | kw
    )


def make(max_num_reqs=8, groups=GROUPS):
    return states_and_buffers(*groups, rows=max_num_reqs, length=64, vocab_size=100, drafts=DRAFTS, tokens=256)


@dataclass
class Req:
    rid: str
    prompt: list
    outputs: list = field(default_factory=list)
    computed: int = 0
    blocks: list = field(default_factory=lambda: [[] for _ in GROUPS])
    status: str = "waiting"
    drafts: list = field(default_factory=list)

    @property
    def tokens(self):
        return self.prompt + self.outputs


class Scheduler:
    """A scheduler in vLLM's protocol, of either generation, with random decisions; it is its own oracle."""

    def __init__(self, seed, generation):
        self.rng = np.random.default_rng(seed)
        self.generation = generation
        self.reqs, self.next_id = {}, 0
        self.free = [list(range(1, 400)) for _ in GROUPS]
        self.finished = set()
        self.known = set()  # what the worker has seen

    def grow(self, req, total):
        new = []
        for g, group in enumerate(GROUPS):
            need = -(-total // group.block_size) - len(req.blocks[g])
            ids = [self.free[g].pop(int(self.rng.integers(len(self.free[g])))) for _ in range(need)]
            req.blocks[g] += ids
            new.append(ids)
        return tuple(new)

    def release(self, req):
        for g in range(len(GROUPS)):
            self.free[g] += req.blocks[g]
        req.blocks = [[] for _ in GROUPS]
        req.computed, req.drafts = 0, []

    def step(self):
        rng = self.rng
        while len(self.reqs) < 6 and rng.random() < 0.6:
            rid = f"q{self.next_id % 9}"  # ids come again, also in the step in which their last owner left
            self.next_id += 1
            if rid not in self.reqs:
                self.reqs[rid] = Req(rid, rng.integers(1, 100, rng.integers(1, 20)).tolist())
        preempted = set()
        for req in self.reqs.values():
            if req.status == "running" and rng.random() < 0.08:
                self.release(req)
                req.status = "preempted"
                preempted.add(req.rid)
        new, entries, resumed, all_tokens, scheduled, drafts = [], [], set(), {}, {}, {}
        for req in sorted(self.reqs.values(), key=lambda r: r.status != "running"):
            if rng.random() < 0.25 or req.rid in preempted:
                continue  # not scheduled, though perhaps running
            need = len(req.tokens) - req.computed
            n = need if rng.random() < 0.5 else int(rng.integers(1, need + 1))
            k = req.drafts if req.status == "running" and n == need else []
            n += len(k)
            if req.computed + n > 64:
                k, n = [], need
            blocks = self.grow(req, req.computed + n)
            if req.status == "waiting" or (req.status == "preempted" and self.generation == 2):
                known = req.tokens if self.generation == 2 else None
                new.append(new_data(req.rid, list(req.prompt), tuple(map(list, req.blocks)), prefill_token_ids=known))
            else:
                if req.status == "preempted":
                    resumed.add(req.rid)
                    all_tokens[req.rid] = list(req.tokens)
                entries.append((req.rid, blocks if any(blocks) else None, req.computed, len(req.outputs)))
            scheduled[req.rid] = n
            if k:
                drafts[req.rid] = list(k)
            req.status = "running"
        out = output(new, cached_data(entries, resumed, all_tokens), scheduled, drafts, self.finished, preempted)
        self.finished = set()
        return out

    def expect(self, scheduled, drafts):
        ids, positions, slots = [], [], [[] for _ in GROUPS]
        for rid, n in scheduled.items():
            req = self.reqs[rid]
            line = req.tokens + drafts.get(rid, [])
            for p in range(req.computed, req.computed + n):
                ids.append(max(line[p], 0))
                positions.append(p)
                for g, group in enumerate(GROUPS):
                    S = group.block_size
                    slots[g].append(req.blocks[g][p // S] * S + p % S)
        return ids, positions, slots

    def sample(self, scheduled, drafts):
        """Draw, verify, finish some; returns what the model sampled."""
        rng, sampled = self.rng, {}
        for rid, n in scheduled.items():
            req, k = self.reqs[rid], len(drafts.get(rid, []))
            if req.computed + n - k < len(req.tokens):
                req.computed += n
                continue
            kept = int(rng.integers(0, k + 1))
            tokens = rng.integers(1, 100, kept + 1).tolist()
            tokens[:kept] = [max(t, 1) for t in drafts.get(rid, [])[:kept]]
            sampled[rid] = tokens
            req.computed += n - (k - kept)
            req.outputs += tokens
            room = 64 - len(req.tokens)
            count = int(rng.integers(0, min(DRAFTS, max(room, 0)) + 1)) if room > 1 else 0
            req.drafts = rng.integers(-1, 100, count).tolist() if rng.random() < 0.3 else [5] * count
            if len(req.tokens) > 55 or rng.random() < 0.1:
                self.release(req)
                del self.reqs[rid]
                self.finished.add(rid)
        return sampled


@pytest.mark.one_in(7)
@pytest.mark.parametrize("way", ["native", "python", "unpickled"])
@pytest.mark.parametrize("form", ["applied", "plan"])
@pytest.mark.parametrize("generation", [1, 2])
def test_random_schedules_prepare_what_a_dictionary_of_requests_says(generation, form, way, monkeypatch):
    if way == "python":
        monkeypatch.setattr(vllm_front, "native_core", lambda *_: None)
    for seed in range(6):
        scheduler = Scheduler(seed, generation)
        states, buffers = make()
        for _ in range(80):
            out = scheduler.step()
            if way == "unpickled":  # equal ids are other objects in every step
                out = pickle.loads(pickle.dumps(out))
            applied = apply(states, out)
            plan = applied if form == "applied" else applied.plan
            batch = prepare_inputs(states, plan, buffers, draft_tokens=applied.draft_tokens)
            scheduled, drafts = out.num_scheduled_tokens, out.scheduled_spec_decode_tokens
            assert dict(applied) == scheduled
            assert batch.req_ids == list(scheduled)
            ids, positions, slots = scheduler.expect(scheduled, drafts)
            assert batch.input_ids.tolist() == ids
            assert batch.positions.tolist() == positions
            assert [s.tolist() for s in batch.slot_mapping] == slots
            assert batch.draft_token_ids.tolist() == [t for rid in scheduled for t in drafts.get(rid, [])]
            for rid, req in scheduler.reqs.items():
                if req.status == "running":  # scheduled now or not: nothing is lost
                    row = states.row_of(rid)
                    assert states.token_ids[row, : states.num_tokens[row]].tolist() == req.tokens
                    assert states.num_computed_tokens[row] == req.computed
                    assert states.prompt_len[row] == len(req.prompt)
                else:
                    assert rid not in states
            states.commit(batch, scheduler.sample(scheduled, drafts))


def test_an_output_without_tokens_still_changes_the_states():
    states, buffers = make()
    apply(states, output([new_data("a", [1, 2], ([1], [1]))], scheduled={"a": 2}))
    applied = apply(states, output(finished=["a"]))
    assert "a" not in states
    assert dict(applied) == {}
    batch = prepare_inputs(states, applied, buffers)
    assert (batch.num_reqs, batch.num_tokens) == (0, 0)


def test_a_resumed_request_of_the_newer_runner_brings_its_outputs():
    states, buffers = make()
    applied = apply(
        states, output([new_data("a", [1, 2], ([1], [1, 2]), prefill_token_ids=[1, 2, 8, 9])], scheduled={"a": 4})
    )
    row = states.row_of("a")
    assert (states.prompt_len[row], states.prefill_len[row]) == (2, 4)
    assert prepare_inputs(states, applied, buffers).input_ids.tolist() == [1, 2, 8, 9]


def test_a_resumed_request_of_the_older_runner_gets_other_blocks_and_keeps_its_parameters():
    states, buffers = make()
    params = SimpleNamespace(temperature=0.5, top_k=-1, seed=3)
    batch = prepare_inputs(
        states,
        apply(states, output([new_data("a", [1, 2], ([1], [1]), sampling_params=params)], scheduled={"a": 2})),
        buffers,
    )
    states.commit(batch, {"a": [9]})
    apply(states, output(preempted=["a"]))
    assert "a" not in states
    cached = cached_data([("a", ([5], [6, 7]), 0, 1)], resumed=["a"])
    applied = apply(states, output(cached=cached, scheduled={"a": 3}))
    batch = prepare_inputs(states, applied, buffers)
    assert batch.input_ids.tolist() == [1, 2, 9]
    assert batch.slot_mapping[1].tolist() == [12, 13, 14]
    row = states.row_of("a")
    assert states.prefill_len[row] == 3
    assert states.sampling.temperature[row] == 0.5
    assert states.sampling.top_k[row] == 0


def test_a_preempted_request_keeps_parameters_of_every_kind():
    rng = np.random.default_rng(7)
    for _ in range(30):
        states, _ = make()
        params = random_sampling(rng)
        apply(states, output([new_data("a", [1, 2], ([1], [1]), sampling_params=params)]))
        row = states.row_of("a")
        before = {name: getattr(states.sampling, name)[row] for name in (*COLUMNS, "is_set")}
        apply(states, output(preempted=["a"]))
        apply(states, output([new_data("other", [1], ([1], [1]))]))  # takes the row
        apply(states, output(cached=cached_data([("a", ([5], [6]), 0, 0)], resumed=["a"])))
        row = states.row_of("a")
        assert {name: getattr(states.sampling, name)[row] for name in before} == before


def test_a_preempted_request_that_finishes_is_dropped():
    states, _ = make()
    apply(states, output([new_data("a", [1, 2], ([1], [1]))], scheduled={"a": 2}))
    apply(states, output(preempted=["a"]))
    assert list(VllmAdapter.of(states).preempted) == ["a"]
    apply(states, output(finished=["a"]))
    assert not VllmAdapter.of(states).preempted


def test_the_schedulers_computed_tokens_correct_ours():
    states, _ = make()
    apply(states, output([new_data("a", [1] * 6, ([1, 2], [1, 2, 3]))], scheduled={"a": 2}))
    apply(states, output(cached=cached_data([("a", None, 4, 0)]), scheduled={"a": 2}))
    assert states.num_computed_tokens[states.row_of("a")] == 4


@pytest.mark.parametrize("front", [vllm_front.native_core, lambda *_: None], ids=["native", "python"])
def test_computed_tokens_counted_before_a_rejection_was_known_are_corrected(front, monkeypatch):
    monkeypatch.setattr(vllm_front, "native_core", front)
    states, buffers = make()
    apply(states, output([new_data("a", [1, 2, 3], ([1, 2, 3], [1, 2, 3, 4, 5]))]))
    states.commit(prepare_inputs(states, {"a": 3}, buffers), {"a": [4]})
    batch = prepare_inputs(states, {"a": 4}, buffers, draft_tokens={"a": [5, 6, 7]})
    states.commit(batch, {"a": [9]})  # all three rejected; the scheduler had planned on with 3 + 4 computed
    drafts = {"a": [-1, -1]}
    applied = apply(states, output(cached=cached_data([("a", None, 7, 5)]), scheduled={"a": 3}, drafts=drafts))
    batch = prepare_inputs(states, applied, buffers)
    assert batch.positions.tolist() == [4, 5, 6]
    assert batch.input_ids[0] == 9


@pytest.mark.parametrize("front", [vllm_front.native_core, lambda *_: None], ids=["native", "python"])
def test_parameters_in_slots_are_read_from_each_state_of_their_type(front, monkeypatch):
    monkeypatch.setattr(vllm_front, "native_core", front)
    values = dict.fromkeys(("seed", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids")) | {
        "temperature": 0.5, "top_p": 0.75, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "top_k": 3, "min_tokens": 0, "bad_words_token_ids": [], "structured_outputs": None,
    }  # fmt: skip

    class Params:
        __slots__ = tuple(values)

    def params(**changed):
        made = Params()
        for name, value in (values | changed).items():
            setattr(made, name, value)
        return made

    states, _ = make()
    given = [params(), params(top_k=4), params(top_k=5), params(top_k=6)]

    def admit(i):
        apply(states, output([new_data(str(i), [1], ([1], [1]), sampling_params=given[i])]))
        return int(states.sampling.top_k[states.row_of(str(i))])

    assert [admit(0), admit(1)] == [3, 4]
    del given[2].top_k  # absent: all tokens
    assert admit(2) == 0
    Params.top_k = property(lambda self: 2)
    assert admit(3) == 2
    assert [float(states.sampling.top_p[states.row_of(r)]) for r in "0123"] == [0.75] * 4


@pytest.mark.parametrize("front", [vllm_front.native_core, lambda *_: None], ids=["native", "python"])
def test_a_step_may_be_applied_while_the_one_before_is_in_flight(front, monkeypatch):
    monkeypatch.setattr(vllm_front, "native_core", front)
    states, first = make()
    second = InputBuffers.for_states(states, max_num_batched_tokens=256)
    apply(states, output([new_data("a", [1, 2, 3], ([1, 2, 3], [1, 2, 3, 4, 5]))]))
    flying = prepare_inputs(states, {"a": 3}, first)
    advance(states, flying)
    for step, buffers in enumerate((second, first, second)):  # the outputs the scheduler counts include placeholders
        cached = cached_data([("a", None, 3 + step, 1 + step)])
        batch = prepare_inputs(states, apply(states, output(cached=cached, scheduled={"a": 1})), buffers)
        assert not batch.is_resolved
        states.commit(flying, {"a": [50 + step]})
        resolve(batch)
        assert (batch.input_ids.tolist(), batch.positions.tolist()) == ([50 + step], [3 + step])
        advance(states, batch)
        flying = batch


def odd_outputs(rng):
    """Outputs with one thing wrong or unusual, and what they hold."""
    many = 2**40
    odd = [None, "x", 1.5, np.int64(1), many, -many, [], True, ("a",), {"a": 1}, -1]
    value = odd[int(rng.integers(len(odd)))]
    cached = cached_data([("a", ([3], [4]), 1, 0), ("b", None, 1, 0)])
    out = output(cached=cached, scheduled={"a": 1, "b": 2}, drafts={"b": [7]})
    match int(rng.integers(13)):
        case 0:
            cached.req_ids[0] = value
        case 1:
            cached.new_block_ids[0] = value
        case 2:
            cached.new_block_ids[0] = ([value], [4])
        case 3:
            cached.new_block_ids[0] = ([3], value)
        case 4:
            cached.new_block_ids = [value]
        case 5:
            cached.num_computed_tokens[1] = value
        case 6:
            cached.num_output_tokens[0] = value
        case 7:
            out.num_scheduled_tokens["a"] = value
        case 8:
            out.num_scheduled_tokens[value if isinstance(value, str | float | int) else "c"] = 1
        case 9:
            out.scheduled_spec_decode_tokens["b"] = value
        case 10:
            out.scheduled_spec_decode_tokens["b"] = [value]
        case 11:
            cached.req_ids = ["a", "a"]
        case 12:
            out.scheduled_new_reqs.append(new_data("n", [1, value], ([value], [5])))
    return out


@pytest.mark.long
def test_odd_outputs_end_as_an_error_or_as_python_would_apply_them(monkeypatch):
    def run(out, front):
        with monkeypatch.context() as patch:
            patch.setattr(vllm_front, "native_core", front)
            states, buffers = make()
            for i, rid in enumerate("ab"):
                states.add_request(NewRequest(rid, [1, 2], [[1 + i], [2 + i, 5]], num_computed_tokens=1))
            try:
                batch = prepare_inputs(states, apply(states, out), buffers)
            except Exception as error:
                return type(error)
            return batch.req_ids, batch.input_ids.tolist(), [s.tolist() for s in batch.slot_mapping]

    for seed in range(400):
        outs = [odd_outputs(np.random.default_rng(seed)) for _ in range(2)]
        assert run(outs[0], vllm_front.native_core) == run(outs[1], lambda *_: None), seed


def test_decode_steps_keep_no_memory():
    states, buffers = make()
    apply(states, output([new_data(r, [1] * 20, ([1] * 16, [1] * 32)) for r in "abcd"]))
    states.commit(prepare_inputs(states, dict.fromkeys("abcd", 20), buffers), np.full(4, 3, np.int32))
    cached, counts = cached_data([(r, None, 20, 1) for r in "abcd"]), dict.fromkeys("abcd", 1)
    out = output(cached=cached, scheduled=counts)

    def steps(n):
        for _ in range(n):
            sampling_metadata(prepare_inputs(states, apply(states, out), buffers))

    steps(20)
    tracemalloc.start()
    try:
        steps(20)
        before = tracemalloc.get_traced_memory()[0]
        steps(2000)
        assert tracemalloc.get_traced_memory()[0] - before < 2000  # bytes: nothing per step
    finally:
        tracemalloc.stop()


def test_outputs_the_scheduler_took_back_are_forgotten():
    states, _ = make()
    states.add_request(NewRequest("a", [1, 2], [[1, 2], [1, 2, 3]], [7, 8, 9], 4))
    apply(states, output(cached=cached_data([("a", None, 2, 1)]), scheduled={"a": 1}))
    row = states.row_of("a")
    assert states.num_tokens[row] == 3
    assert states.last_sampled_token[row] == 7


def test_a_pipeline_rank_receives_the_tokens_it_did_not_sample():
    states, buffers = make()
    apply(states, output([new_data("a", [1, 2], ([1], [1, 2]))], scheduled={"a": 2}))
    cached = cached_data([("a", None, 2, 1)])
    cached.new_token_ids = [[9]]
    batch = prepare_inputs(states, apply(states, output(cached=cached, scheduled={"a": 1})), buffers)
    assert batch.input_ids.tolist() == [9]
    assert batch.positions.tolist() == [2]


def test_a_known_id_sent_as_new_is_replaced():
    states, _ = make()
    apply(states, output([new_data("a", [1, 2], ([1], [1]))], scheduled={"a": 2}))
    apply(states, output([new_data("a", [1, 2, 3, 4], ([1], [1, 2]), num_computed_tokens=2)], scheduled={"a": 2}))
    assert states.num_tokens[states.row_of("a")] == 4
    assert len(states) == 1


def test_block_operations_encoder_work_and_grammar_are_passed_on():
    states, _ = make()
    applied = apply(
        states,
        output(
            new_block_ids_to_zero=[4, 5],
            kv_cache_block_copies=[(1, 6)],
            scheduled_encoder_inputs={"a": [0]},
            free_encoder_mm_hashes=["h"],
            has_structured_output_requests=True,
        ),
    )
    assert applied.block_ops.zero.tolist() == [4, 5]
    assert applied.block_ops.copies.tolist() == [[1, 6]]
    assert applied.encoder_inputs == {"a": [0]}
    assert applied.free_encoder_inputs == ["h"]
    assert applied.has_structured_output


@pytest.mark.parametrize(
    ("given", "zero", "copies"),
    [
        ({}, [], []),
        ({"new_block_ids_to_zero": [4]}, [4], []),
        ({"kv_cache_block_copies": [(1, 6)]}, [], [[1, 6]]),
        ({"new_block_ids_to_zero": [], "kv_cache_block_copies": [(1, 6)]}, [], [[1, 6]]),
        ({"new_block_ids_to_zero": None, "kv_cache_block_copies": None}, [], []),
    ],
)
def test_zeroed_and_copied_blocks_are_passed_on_without_the_other(given, zero, copies):
    states, _ = make()
    ops = apply(states, output(**given)).block_ops
    assert ops.zero.tolist() == zero
    assert ops.copies.tolist() == copies


def test_the_finished_and_the_preempted_leave_in_the_same_order_on_every_rank():
    rows = []
    for order in (["b", "a", "c"], ["c", "a", "b"]):
        states, _ = make()
        apply(states, output([new_data(r, [1], ([i], [i])) for i, r in enumerate("abcd", 1)]))
        apply(states, output(finished=order))
        apply(states, output([new_data(r, [1], ([i], [i])) for i, r in enumerate("xyz", 1)]))
        rows.append([states.row_of(r) for r in "xyz"])
    assert rows[0] == rows[1]


def test_everything_a_new_request_may_carry_arrives():
    states, buffers = make()
    feature = SimpleNamespace(
        identifier="h", modality="video", mm_position=SimpleNamespace(offset=1, length=3, is_embed=[True, False, True])
    )
    params = SimpleNamespace(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=0.1, frequency_penalty=0.2,
        repetition_penalty=1.1, seed=11, min_tokens=2, logprobs=3, prompt_logprobs=None, stop_token_ids=[4],
        logit_bias={3: 1.0}, allowed_token_ids=[1, 2], bad_words_token_ids=[[7, 8]], max_tokens=9, stop=None,
    )  # fmt: skip
    embeds = np.ones((2, 3), np.float32)
    new = [
        new_data("a", [1, 2, 3, 4, 5], ([1, 2], [1, 2, 3]), sampling_params=params, mm_features=[feature],
                 lora_request=SimpleNamespace(lora_int_id=6)),
        new_data("b", None, ([3], [4]), prompt_embeds=embeds),
        new_data("c", [1], ([4], [5]), pooling_params=SimpleNamespace(task="score", dimensions=None, normalize=False)),
    ]  # fmt: skip
    batch = prepare_inputs(states, apply(states, output(new, scheduled={"a": 5, "b": 2, "c": 1})), buffers)
    a = states.row_of("a")
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                 "repetition_penalty", "seed", "min_tokens"):  # fmt: skip
        assert getattr(states.sampling, name)[a] == pytest.approx(getattr(params, name))
    assert states.sampling.num_logprobs[a] == 3
    metadata = sampling_metadata(batch)
    assert metadata.bad_words() == {0: ((7, 8),)}
    assert metadata.end_token_ids() == {0: (4,)}
    assert mm_inputs(batch).token_indices.tolist() == [1, 3]
    assert lora_mapping(batch).requests.tolist() == [6, 0, 0]
    assert np.array_equal(prompt_embeds(batch)[1], embeds)
    assert pooling_metadata(batch).params[0].task == "score"


def random_sampling(rng):
    def maybe(value, otherwise):
        return value if rng.random() < 0.4 else otherwise

    return SimpleNamespace(
        temperature=maybe(0.0, 0.7), top_p=maybe(0.9, 1.0), top_k=maybe(int(rng.integers(-1, 150)), 0),
        min_p=maybe(0.1, 0), presence_penalty=maybe(0.5, 0.0), frequency_penalty=maybe(0.5, 0.0),
        repetition_penalty=maybe(1.5, 1.0), seed=maybe(int(rng.integers(2**40)), None), min_tokens=maybe(3, 0),
        logprobs=maybe(int(rng.integers(-1, 5)), None), prompt_logprobs=maybe(1, None), stop_token_ids=[4],
        logit_bias=maybe({3: 1.0}, None), allowed_token_ids=maybe([1, 2], None), max_tokens=9, stop=None,
        bad_words_token_ids=maybe([[7]], None), structured_outputs=maybe(SimpleNamespace(json=None, regex="g"), None),
    )  # fmt: skip


def test_parameters_read_in_native_code_are_those_read_in_python(monkeypatch):
    rng = np.random.default_rng(5)
    for _ in range(50):
        params = [random_sampling(rng) if rng.random() < 0.8 else None for _ in range(8)]
        new = [new_data(str(i), [1, 2], ([1], [1]), sampling_params=p) for i, p in enumerate(params)]
        columns = []
        for front in (vllm_front.native_core, lambda *_: None):
            with monkeypatch.context() as patch:
                patch.setattr(vllm_front, "native_core", front)
                states, _ = make()
                apply(states, output(new))
                rows = [states.row_of(str(i)) for i in range(8)]
                c = states.sampling
                columns.append({name: getattr(c, name)[rows].tolist() for name in (*COLUMNS, "is_set")})
        assert columns[0] == columns[1]


@pytest.mark.parametrize("place", [0, 63, 64, 150])
@pytest.mark.parametrize("odd", [0, 255, 2**30, 2**31 - 2, True, -1, -(2**40), 2**64, 1.5, "x", None, object()])
def test_tokens_of_a_long_prompt_are_read_in_native_code_as_in_python(odd, place, monkeypatch):
    prompt: list = np.random.default_rng(place).integers(1, 2**31 - 1, 151).tolist()
    prompt[:70] = [t % 1000 for t in prompt[:70]]  # these have one digit
    prompt[place] = odd
    found = []
    for front in (vllm_front.native_core, lambda *_: None):
        with monkeypatch.context() as patch:
            patch.setattr(vllm_front, "native_core", front)
            states, _ = states_and_buffers(KVGroup(256), rows=1, length=256, vocab_size=2**31 - 1, tokens=256)
            try:
                apply(states, output([new_data("a", prompt, ([1],))]))
                found.append(states.token_ids[0, :151].tolist())
            except RequestError as error:
                found.append(str(error))
    assert found[0] == found[1]
    if type(odd) is int and odd >= 0 and odd < 2**31:
        assert found[0] == prompt


def test_ids_kept_by_the_states_are_the_schedulers_own_objects():
    states, _ = make()
    rid = "".join(["re", "quest"])
    apply(states, output([new_data(rid, [1], ([1], [1]))]))
    assert states.req_id_of(states.row_of(rid)) is rid  # so that looking for it is comparing pointers


def test_arrivals_are_all_or_nothing_in_native_code():
    states, _ = make()
    with pytest.raises(RequestError, match="'b'"):
        apply(states, output([new_data("a", [1], ([1], [1])), new_data("b", [], ([1], [1]))]))
    with pytest.raises(RequestError, match="'c'"):
        apply(states, output([new_data("c", [1, "x"], ([1], [1]))]))
    assert states.req_ids == ("a",)
    apply(states, output([new_data("d", [1], ([1], [1])), new_data("d", [2, 3], ([1], [1]))]))
    assert states.num_tokens[states.row_of("d")] == 2


def test_drafts_of_a_request_that_is_not_scheduled_are_refused():
    states, _ = make()
    apply(states, output([new_data("a", [1], ([1], [1]))]))
    with pytest.raises(PlanError, match="not scheduled"):
        apply(states, output(drafts={"a": [1]}))


def test_the_first_entry_that_does_not_fit_is_named():
    states, _ = make(max_num_reqs=1)
    with pytest.raises(RequestError, match="'ghost'"):
        apply(states, output(cached=cached_data([("ghost", None, 0, 0)])))
    with pytest.raises(RequestError, match="'ghost'"):
        apply(states, output(cached=cached_data([("ghost", ([1], [1]), 0, 0)], resumed=["ghost"])))
    with pytest.raises(RequestError, match="'ghost'"):
        apply(states, output(scheduled={"ghost": 1}))
    with pytest.raises(RequestError, match="'a'"):
        apply(states, output([new_data("a", [100], ([1], [1]))]))
    apply(states, output([new_data("a", [1], ([1], [1]))]))
    with pytest.raises(CapacityError, match="'b'"):
        apply(states, output([new_data("b", [1], ([1], [1]))]))
    with pytest.raises(CapacityError, match="'a'"):
        apply(states, output(cached=cached_data([("a", ([1] * 17, []), 0, 0)])))
    assert states.block_tables[0].num_blocks[states.row_of("a")] == 1
    with pytest.raises(RequestError, match="num_computed_tokens"):
        apply(states, output(cached=cached_data([("a", None, -1, 0)])))
    for computed, tokens in ((5, [1]), (1, [100]), (1, [1] * 64)):
        cached = cached_data([("a", None, computed, 1)])
        cached.new_token_ids = [tokens]
        with pytest.raises((RequestError, CapacityError), match="'a'"):
            apply(states, output(cached=cached))


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"scheduled": {"a": 1.5}}, "num_scheduled_tokens"),
        ({"scheduled": {"a": 2}, "drafts": {"a": "x"}}, "draft_tokens"),
        ({"cached": cached_data([("a", None, 0, 0)]), "missing": "new_block_ids"}, "new_block_ids"),
    ],
)
def test_an_output_of_the_wrong_form_is_refused_by_field(changes, tensor):
    states, _ = make()
    apply(states, output([new_data("a", [1], ([1], [1]))]))
    if field := changes.pop("missing", None):
        setattr(changes["cached"], field, [])
    with pytest.raises(PlanError) as caught:
        apply(states, output(**changes))
    assert caught.value.tensor == tensor
