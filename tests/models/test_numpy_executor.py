"""The NumPy executor on tiny random models: chunks, batches, windows, experts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.executors.numpy import NumpyExecutor
from foreword.executors.pool import batch_groups
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec, RopeSpec, weight_names

S = 4


def tiny(windows=(None, None), **kwargs) -> DecoderSpec:
    rope = RopeSpec(tuple(10000.0 ** (-2 * j / 8) for j in range(4)))
    moe = kwargs.pop("moe", None)
    layers = tuple(LayerSpec(rope=rope, sliding_window=w, moe=moe) for w in windows)
    return DecoderSpec(
        architecture="tiny", vocab_size=50, hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2,
        head_dim=8, max_model_len=64, layers=layers, norm_eps=1e-5, query_scale=8**-0.5, **kwargs,
    )  # fmt: skip


class RandomWeights(dict):
    def __init__(self, spec: DecoderSpec, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        for name, shape in weight_names(spec):
            value = rng.standard_normal(shape).astype(np.float32) * 0.3
            if name.endswith("norm"):
                value += 1
            self[name] = SimpleNamespace(dequantize=lambda value=value: value)


MODELS = {
    "llama": tiny(tie_embeddings=True),
    "qwen2": tiny(qkv_bias=True),
    "gemma": tiny((5, 5, None), qk_norm=True, post_norms=True, activation="gelu_tanh", embedding_scale=4.0,
                  attn_softcap=20.0, final_softcap=30.0, tie_embeddings=True),
    "mixtral": tiny(moe=MoeSpec(4, 2, 12)),
    "qwen-moe": tiny(moe=MoeSpec(4, 2, 12, norm_topk=False, shared_intermediate_size=10)),
}  # fmt: skip


def serve(spec: DecoderSpec, prompts: list[list[int]], chunk: int, num_outputs: int) -> list[list[np.ndarray]]:
    """Greedy logits of each request at each output position, all requests in one batch, chunks of ``chunk``."""
    groups = batch_groups(spec, S)
    states = RequestStates(
        max_num_reqs=len(prompts), max_model_len=spec.max_model_len, vocab_size=spec.vocab_size, kv_groups=groups
    )
    buffers = InputBuffers.for_states(states, 256)
    next_block = 1
    for i, prompt in enumerate(prompts):
        blocks = []
        for table in states.block_tables:
            blocks.append(list(range(next_block, next_block + table.width)))
            next_block += table.width
        states.add_request(NewRequest(str(i), prompt, blocks))
    executor = NumpyExecutor(spec, RandomWeights(spec), num_blocks=next_block, block_size=S)
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    while any(len(out) < num_outputs for out in logits):
        plan = {}
        for i in range(len(prompts)):
            need = int(states.num_tokens[states.row_of(str(i))] - states.num_computed_tokens[states.row_of(str(i))])
            if len(logits[i]) < num_outputs:
                plan[str(i)] = min(need, chunk)
        batch = prepare_inputs(states, plan, buffers)
        out = executor.compute(batch, batch.logits_indices).copy()
        sampled = {}
        for b, rid in enumerate(batch.req_ids):
            if batch.seq_lens[b] == states.num_tokens[states.row_of(rid)]:
                logits[int(rid)].append(out[b])
                sampled[rid] = [int(out[b].argmax())]
        states.commit(batch, sampled)
    return logits


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8], [1], list(range(20))]


@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_chunks_and_other_requests(name):
    spec = MODELS[name]
    alone = [serve(spec, [p], chunk=64, num_outputs=4)[0] for p in PROMPTS]
    for chunk in (1, 3, 64):
        together = serve(spec, PROMPTS, chunk, num_outputs=4)
        for one, many in zip(alone, together, strict=True):
            np.testing.assert_allclose(many, one, atol=2e-5, rtol=1e-4)


def test_tokens_before_the_sliding_window_do_not_matter():
    spec = tiny((3,), tie_embeddings=True)
    base = serve(spec, [[1, 2, 3, 4, 5, 6]], 64, 1)[0][0]
    np.testing.assert_allclose(serve(spec, [[40, 41, 42, 4, 5, 6]], 64, 1)[0][0], base, atol=1e-5)
    assert np.abs(serve(spec, [[1, 2, 3, 44, 5, 6]], 64, 1)[0][0] - base).max() > 1e-3


def test_identical_experts_equal_a_dense_mlp():
    dense, moe = tiny(), tiny(moe=MoeSpec(4, 2, 24))
    groups = [KVGroup(block_size=S)]
    outputs = []
    for spec in (dense, moe):
        weights = RandomWeights(dense)
        if spec is moe:
            for name, _ in weight_names(moe):
                if ".experts." in name:
                    layer, _, rest = name.partition("experts.")
                    weights[name] = weights[layer + rest.partition(".")[2]]
                elif name not in weights:
                    router = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
                    weights[name] = SimpleNamespace(dequantize=lambda router=router: router)
        states = RequestStates(max_num_reqs=1, max_model_len=64, vocab_size=50, kv_groups=groups)
        states.add_request(NewRequest("a", [5, 6, 7], [[1]]))
        batch = prepare_inputs(states, {"a": 3}, InputBuffers.for_states(states, 8))
        outputs.append(NumpyExecutor(spec, weights, num_blocks=2, block_size=S).compute(batch, batch.logits_indices))
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-5)
