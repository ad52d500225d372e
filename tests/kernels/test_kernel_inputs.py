"""Prompts with embeddings and rotary positions on the native executor: equal to plain tokens, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_reference import random_weights, rope, tiny_spec

from foreword.batch import KVGroup, SamplingParams
from foreword.engine import Engine, engine_config
from foreword.engine.speculation import SpeculationConfig
from foreword.models.spec import LayerSpec
from models.running import EXECUTORS

AXES = (0, 1, 2, 2, 1, 0, 0, 1)
ROPES = replace(rope(16), axes=AXES), rope(16)
SPECS = {
    "mrope": tiny_spec(embedding_scale=3.0, layers=tuple(LayerSpec(replace(r, axes=AXES)) for r in ROPES)),
    "window": tiny_spec(layers=(LayerSpec(ROPES[0], 24), LayerSpec(ROPES[1]), LayerSpec(ROPES[0], 24))),
}
WEIGHTS = {name: random_weights(spec) for name, spec in SPECS.items()}
NUM_BLOCKS, BLOCK_SIZE = 110, 8


def engine(name, *, kind="native", num_threads=2, formats=("fp32", "fp32"), num_blocks=NUM_BLOCKS, **config):
    spec, options = SPECS[name], {}
    if kind == "native":
        options = {"num_threads": num_threads, "weight_format": formats[0], "kv_format": formats[1]}
    return Engine(
        EXECUTORS[kind](spec, WEIGHTS[name], num_blocks=num_blocks, block_size=BLOCK_SIZE, **options),
        vocab_size=spec.vocab_size,
        max_model_len=90,
        kv_groups=[KVGroup(BLOCK_SIZE, sliding_window=g.sliding_window) for g in spec.kv_groups()],
        num_blocks=num_blocks,
        config=engine_config({"block_size": BLOCK_SIZE, "check": "full", **config}),
    )


def run(engine, wanted):
    for request_id, prompt, params in wanted:
        engine.add_request(request_id, prompt, params)
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    assert engine.cache.pool.num_used == 0
    return outputs


def some_positions(rng, length):
    """Rotary positions of text with a run that is an image, and the delta after them."""
    start, size = int(rng.integers(0, length)), int(rng.integers(1, 30))
    size = min(size, length - start)
    positions = np.tile(np.arange(length), (3, 1))
    positions[:, start : start + size] = start + rng.integers(0, 6, (3, size))
    after = int(positions[:, start : start + size].max()) + 1
    positions[:, start + size :] = after + np.arange(length - start - size)
    return positions, after - (start + size)


def requests(rng, name):
    """(id, prompt, the same as tokens alone, parameters). Prompts share beginnings, tokens and positions, in part."""
    table = WEIGHTS[name]["embed"].dequantize() * np.float32(SPECS[name].embedding_scale)
    stems = [(rng.integers(0, 301, 50), rng.random(50) < 0.6, some_positions(rng, 50)) for _ in range(2)]
    for i in range(20):
        ids, is_token, (positions, delta) = stems[rng.integers(2)]
        tail = rng.integers(0, 301, rng.integers(1, 6))
        length = int(rng.integers(1, 50))
        ids = np.concatenate([ids[:length], tail])
        is_token = np.concatenate([is_token[:length], rng.random(len(tail)) < 0.5])
        if rng.random() < 0.3:
            is_token = ~is_token
        plain, mixed = {"prompt_token_ids": ids.tolist()}, {}
        if (kind := rng.integers(4)) > 0:
            rows = np.where(is_token[:, None], 7.0, table[ids])
            mixed = {"prompt_token_ids": np.where(is_token, ids, 5), "prompt_is_token_ids": is_token,
                     "prompt_embeds": rows} if kind > 1 else {"prompt_embeds": table[ids]}  # fmt: skip
        if rng.random() < 0.6:
            if rng.random() < 0.3:  # another image in the same place
                positions = positions.copy()
                positions[1:, 3:] += rng.integers(0, 2, 47)
            more = {"mrope_positions": positions[:, :length], "mrope_delta": max(delta, -length)}
            plain |= more
            mixed |= more
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 1.0])),
            max_tokens=int(rng.integers(1, 24)),
            seed=i,
            logprobs=2,
            n=int(rng.choice([1, 1, 2])),
        )
        yield f"r{i}", mixed if kind else {**mixed, **plain}, plain, params


def results(output):
    return [(c.token_ids, c.logprobs) for c in output.outputs]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "formats"), [("mrope", ("fp32", "fp32")), ("window", ("bf16", "bf16")), ("mrope", ("int8", "int8"))]
)
def test_embeddings_give_what_their_tokens_give_in_any_traffic(name, formats, seed):
    """In a crowd, in chunks, preempted, from cached prefixes, with drafts: as the tokens alone, computed at once."""
    rng = np.random.default_rng(seed)
    wanted = list(requests(rng, name))
    num_blocks = 1 + 12 * len(SPECS[name].kv_groups()) + int(rng.integers(1, 50))  # few preempt, many keep prefixes
    crowd = engine(
        name, formats=formats, num_blocks=num_blocks, max_num_seqs=6, watermark=0.0,
        max_num_batched_tokens=int(rng.integers(5, 60)), async_scheduling=bool(rng.integers(2)),
        speculation=SpeculationConfig(num_tokens=3, min_match=1, adaptive=False) if rng.integers(2) else None,
    )  # fmt: skip
    got = run(crowd, [(request_id, mixed, params) for request_id, mixed, _, params in wanted])
    crowd.close()
    alone = engine(name, num_threads=1, formats=formats, prefix_caching=False, max_num_batched_tokens=512)
    for request_id, _, plain, params in wanted:
        assert results(got[request_id]) == results(run(alone, [(request_id, plain, params)])[request_id]), request_id


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [kind for kind in EXECUTORS if kind != "numpy"])
@pytest.mark.parametrize("name", SPECS)
def test_other_executors_give_the_logits_of_the_numpy_one(name, kind):
    rng = np.random.default_rng(9)
    wanted = [(i, {**mixed, "prompt_embeds": mixed["prompt_embeds"] + rng.normal(0, 0.2, (1, 96))}, params)
              for i, mixed, _, params in requests(rng, name) if "prompt_embeds" in mixed]  # fmt: skip
    config = {"max_num_batched_tokens": 40, "max_num_seqs": 4}
    got, want = (run(engine(name, kind=k, **config), wanted) for k in (kind, "numpy"))
    for request_id, _, _ in wanted:
        for ours, theirs in zip(got[request_id].outputs, want[request_id].outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert abs(ours.cumulative_logprob - theirs.cumulative_logprob) < 1e-3


def test_a_step_of_text_is_computed_from_the_same_arguments_as_without_the_feature(monkeypatch):
    """Embeddings and positions cost nothing while the live requests have none, also after some had."""
    made, given = engine("mrope"), []
    inputs = made.executor._given_inputs
    monkeypatch.setattr(made.executor, "_given_inputs", lambda batch: given.append(inputs(batch)) or given[-1])
    table = WEIGHTS["mrope"]["embed"].dequantize()
    positions = np.zeros((3, 4), np.int32)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    run(made, [("a", {"prompt_embeds": table[:9], "mrope_positions": positions, "mrope_delta": -2}, params)])
    assert [sorted(names) for names in given] == [["embed_rows", "embeds", "mrope_positions"]] + [
        ["mrope_positions"]
    ] * 2
    given.clear()
    run(made, [("b", list(range(20)), params)])
    assert given == [{}] * 3
