"""The seam between engine and executor: capabilities, block operations, padding, pending steps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_rig import V, make_engine, run
from oracle_model import OracleExecutor

from foreword.batch import (
    BlockOps,
    ContextParallel,
    InputBuffers,
    KVGroup,
    MultiModalFeature,
    NewRequest,
    PoolingParams,
    RequestStates,
    SamplingParams,
    prepare_inputs,
    sampling_metadata,
)
from foreword.engine import Engine
from foreword.errors import ConfigError, PlanError, RequestError
from foreword.executors import Capability, HostExecutor, check_inputs
from foreword.models.lora import LoraAdapter
from foreword.models.spec import LayerSpec, RopeSpec
from foreword.sampling import Processors
from kernels.kernel_reference import random_weights, tiny_spec
from models.running import EXECUTORS

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
EVERYTHING = frozenset(Capability)


@pytest.mark.parametrize("kind", EXECUTORS.values(), ids=EXECUTORS)
def test_what_the_executors_here_read_follows_from_the_model(kind):
    spec = tiny_spec()
    mrope = replace(spec, layers=(LayerSpec(RopeSpec((1.0, 0.5), axes=(0, 2))), *spec.layers[1:]))
    for model, capabilities, dims in ((spec, set(), 0), (mrope, {Capability.MROPE}, 3)):
        executor = kind(model, random_weights(model), num_blocks=3, block_size=4)
        always = {Capability.GRAMMAR, Capability.LORA, Capability.POOLING, Capability.PROMPT_EMBEDS}
        always |= {Capability.RECURRENT_STATE, Capability.DRAFTED_STATES, Capability.BLOCK_TRANSFER}
        assert executor.capabilities == always | capabilities
        assert (executor.hidden_size, executor.mrope_dims) == (model.hidden_size, dims)


def test_a_request_that_needs_a_missing_capability_is_refused_by_name():
    engine = make_engine()
    with pytest.raises(RequestError, match=r"request 'a': lora = 'law': OracleExecutor .*Capability\.LORA"):
        engine.add_request("a", [1, 2, 3], GREEDY, lora="law")
    with pytest.raises(ConfigError, match="OracleExecutor runs no LoRA adapters"):
        engine.load_lora("law", "adapters/law")
    assert not engine.has_work


def test_an_executor_holds_the_adapters_of_its_requests_by_number():
    held = {}

    class Adapters(OracleExecutor):
        capabilities = OracleExecutor.capabilities | {Capability.LORA}

        def load_lora(self, lora_id, adapter):
            held[lora_id] = adapter
            return 8

        def drop_lora(self, lora_id):
            del held[lora_id]

    first, second = LoraAdapter(Path("first"), {}), LoraAdapter(Path("second"), {})
    engine = make_engine(executor=Adapters)
    engine.load_lora("law", first)
    engine.add_request("a", [1, 2, 3], GREEDY, lora="law")
    engine.load_lora("law", second)
    engine.add_request("b", [1, 2, 3], GREEDY, lora="law")
    engine.add_request("c", [1, 2, 3], GREEDY)
    engine.step()
    numbers = [int(engine.states.lora_id[engine.states.row_of(name)]) for name in "abc"]
    assert held == dict(zip(numbers, [first, second], strict=False))
    assert numbers[2] == 0
    run(engine)
    assert held == {numbers[1]: second}


def test_recurrent_groups_need_a_capability_too():
    class Paged(OracleExecutor):
        capabilities = frozenset()

    with pytest.raises(ConfigError, match=r"kv_groups: Paged .*Capability\.RECURRENT_STATE"):
        make_engine(executor=Paged, groups=[KVGroup(4, recurrent=True)])


def test_prompts_whose_tokens_see_each_other_need_a_capability_too():
    class Causal(OracleExecutor):
        capabilities = frozenset()

    groups = [KVGroup(4)]
    with pytest.raises(ConfigError, match=r"prefix_lm: Causal .*Capability\.BIDIRECTIONAL.* prefix_lm to false in"):
        Engine(Causal(V, groups, 8), vocab_size=V, max_model_len=16, kv_groups=groups, num_blocks=8, prefix_lm=True)


INPUTS = {
    Capability.LORA: {"lora_id": 3},
    Capability.PROMPT_EMBEDS: {"prompt_token_ids": None, "prompt_embeds": np.ones((3, 2), np.float32)},
    Capability.MROPE: {"mrope_positions": np.zeros((3, 3), np.int32)},
    Capability.MULTIMODAL: {"mm_features": [MultiModalFeature("cat", 0, 2)]},
    Capability.BIDIRECTIONAL: {"bidirectional_ranges": [(0, 2)]},
    Capability.POOLING: {"pooling_params": PoolingParams(task="embed")},
    Capability.ENCODER: {"encoder_len": 5},
}


@pytest.mark.parametrize("capability", INPUTS, ids=lambda c: c.name)
def test_a_batch_with_an_input_that_is_not_read_is_refused_before_anything_is_written(capability):
    states = RequestStates(max_num_reqs=3, max_model_len=8, vocab_size=V, kv_groups=[KVGroup(4)])
    states.add_request(NewRequest("plain", [1, 2, 3], [[1]]))
    states.add_request(replace(NewRequest("special", [1, 2, 3], [[2]]), **INPUTS[capability]))
    buffers = InputBuffers.for_states(states, 16)
    executor = OracleExecutor(V, [KVGroup(4)], 4)
    batch = prepare_inputs(states, {"plain": 3, "special": 3}, buffers, block_ops=BlockOps.of(copies=[(3, 2)]))
    with pytest.raises(PlanError, match=rf"Capability\.{capability.name}\).*request 'special'"):
        executor.launch(batch, Processors(states).step(sampling_metadata(batch)))
    assert (executor.tokens[0] == -1).all()
    check_inputs(batch, EVERYTHING - set(INPUTS) | {capability})
    check_inputs(prepare_inputs(states, {"plain": 3}, buffers), frozenset())


@pytest.mark.parametrize(
    ("capability", "group", "sizes"),
    [
        (Capability.CONTEXT_PARALLEL, KVGroup(4, context_parallel=True), {"context_parallel": ContextParallel(2, 0)}),
        (Capability.RECURRENT_STATE, KVGroup(4, recurrent=True), {}),
        (Capability.DRAFTED_STATES, KVGroup(4, recurrent=True), {"max_num_draft_tokens": 2}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_batch_whose_kv_groups_the_executor_cannot_read_is_refused_before_anything_is_written(
    capability, group, sizes
):
    states = RequestStates(max_num_reqs=3, max_model_len=8, vocab_size=V, kv_groups=[KVGroup(4), group], **sizes)
    states.add_request(NewRequest("a", [1, 2, 3], [[1], [2]]))
    buffers = InputBuffers.for_states(states, 16)
    batch = prepare_inputs(states, {"a": 3}, buffers, block_ops=BlockOps.of(copies=[(3, 2)]))

    class Plain(OracleExecutor):
        capabilities = EVERYTHING - {capability}

    executor = Plain(V, [KVGroup(4), KVGroup(4)], 4)
    with pytest.raises(PlanError, match=rf"Capability\.{capability.name}\).*kv_groups\[1\]"):
        executor.launch(batch, Processors(states).step(sampling_metadata(batch)))
    assert (executor.tokens[0] == -1).all()
    check_inputs(batch, frozenset({capability, Capability.RECURRENT_STATE}))


def test_block_operations_come_before_the_step_zeros_before_copies():
    calls = []

    class Recording(HostExecutor):
        def compute(self, batch, logits_indices):
            calls.append("compute")
            return np.zeros((len(logits_indices), V), np.float32)

        def copy_blocks(self, sources, destinations):
            calls.append(("copy", sources.tolist(), destinations.tolist()))

        def zero_blocks(self, blocks):
            calls.append(("zero", blocks.tolist()))

    states = RequestStates(max_num_reqs=1, max_model_len=8, vocab_size=V, kv_groups=[KVGroup(4)])
    states.add_request(NewRequest("a", [1, 2, 3], [[2]]))
    ops = BlockOps.of([2], [(1, 2), (3, 4)])
    batch = prepare_inputs(states, {"a": 3}, InputBuffers.for_states(states, 8), block_ops=ops)
    pending = Recording().launch(batch, Processors(states).step(sampling_metadata(batch)))
    assert calls == [("zero", [2]), ("copy", [1, 3], [2, 4])]
    assert pending.result().token_ids.tolist() == [0]
    assert calls[2:] == ["compute"]


def test_zeroing_is_refused_by_an_executor_without_it():
    with pytest.raises(PlanError, match="OracleExecutor cannot zero blocks"):
        OracleExecutor(V, [KVGroup(4)], 4).apply_block_ops(BlockOps.of([2]))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_are_padded_to_the_sizes_of_the_executor(async_scheduling):
    shapes = []

    class Padded(OracleExecutor):
        def pad_for(self, num_tokens, num_reqs):
            return -(-num_tokens // 8) * 8, -(-num_reqs // 4) * 4

        def compute(self, batch, logits_indices):
            shapes.append((batch.num_tokens_padded, batch.num_reqs_padded, len(batch.input_ids), len(batch.seq_lens)))
            return super().compute(batch, logits_indices)

    def tokens(executor):
        engine = make_engine(executor=executor, async_scheduling=async_scheduling)
        for i in range(5):
            engine.add_request(str(i), list(range(1, 4 + i)), GREEDY)
        outputs = run(engine)
        engine.close()
        return {name: output.outputs[0].token_ids for name, output in outputs.items()}

    assert tokens(Padded) == tokens(OracleExecutor)
    assert {(t % 8, b % 4) for t, b, _, _ in shapes} == {(0, 0)}
    assert all((t, b) == (num_ids, num_lens) for t, b, num_ids, num_lens in shapes)


def test_a_step_without_its_block_copies_is_refused_by_the_full_check():
    """A hit inside a block starts from a copy; without it the request would read what an earlier one left there."""
    engine = make_engine(blocks=17, check="full")
    schedule = engine.scheduler.schedule
    dropped = []

    def without_copies(in_flight=None):
        plan = schedule(in_flight)
        dropped.extend(plan.block_ops.copies.tolist())
        return replace(plan, block_ops=BlockOps.of())

    first = list(range(1, 11))
    engine.add_request("fills the pool", [20] * 60, SamplingParams(temperature=0.0, max_tokens=4))
    run(engine)
    engine.add_request("a", first, SamplingParams(temperature=0.0, max_tokens=1))
    run(engine)
    engine.scheduler.schedule = without_copies
    engine.add_request("b", [*first[:6], 28, 28], SamplingParams(temperature=0.0, max_tokens=4))
    with pytest.raises(PlanError, match="does not hold the request's tokens"):
        engine.step()
    assert len(dropped) == 1
