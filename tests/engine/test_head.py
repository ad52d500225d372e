"""Drafts from the head of a checkpoint for further tokens (MTP), against the definition over whole texts."""

import numpy as np
import pytest
from engine_rig import run

from foreword.batch import KVGroup, NewRequest, RequestStates, SamplingParams
from foreword.engine import engine_config
from foreword.engine.build import build_engine
from foreword.engine.footprint import footprint
from foreword.engine.model import model_of
from foreword.engine.speculation import probes
from foreword.engine.speculation.gone_rows import GoneRows
from foreword.errors import ConfigError, ModelError
from foreword.executors.kinds import KINDS
from foreword.models.loader import load_model
from models.head_models import IN_GGUF, drafts_of, head_shapes, with_head
from models.recorded import TINY, make
from models.running import FLOATS
from models.tiny import random_tensors, write_model

LENGTH = 18
KIND = "native" if "native" in FLOATS else "numpy"


def engine_of(model, kind: str, more=(), **config):
    threads = {"num_threads": 1} if kind == "native" else {}
    chosen = KINDS[kind].read_options(FLOATS[kind] | threads | dict(more))
    settings = {"max_num_seqs": 4, "block_size": 4, "max_model_len": 64, "kv_cache_bytes": 1 << 22}
    return build_engine(model_of(model, KINDS[kind], chosen), engine_config(settings | config))


def results(engine, prompts, temperature: float = 0.0) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=LENGTH - i, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    outputs = run(engine)
    return [outputs[str(i)].outputs[0].token_ids for i in range(len(prompts))]


def prompts_of(model) -> list[list[int]]:
    rng = np.random.default_rng(3)
    stem = rng.integers(3, model.spec.vocab_size, 20).tolist()
    return [stem, stem[:9], [*stem[:13], 5, 6], stem]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("kind", "name", "async_scheduling"),
    [
        *((kind, "qwen3_5", True) for kind in FLOATS),
        *((KIND, name, False) for name in ("qwen3-next", "deepseek-v3", "glm4-moe", "bailing-hybrid", "glm-moe-dsa")),
    ],
)
def test_a_head_drafts_what_its_definition_says_and_changes_no_token(kind, name, async_scheduling, tmp_path):
    """In chunks, beside others, after rejected drafts, and behind a hit, where it sees the rest of the prompt."""
    model = with_head(tmp_path, name)
    prompts = prompts_of(model)
    want = results(engine_of(model, kind), prompts)
    options = {"speculation": "head", "speculation_num_tokens": 3, "speculation_adaptive": False}
    engine = engine_of(
        model, kind, max_num_batched_tokens=16, async_scheduling=async_scheduling, prefix_caching=False, **options
    )
    drafter, proposed = engine.speculation.drafter, []
    propose = drafter.propose

    def recorded(rows, most):
        drafts = propose(rows, most)
        texts = [engine.states.token_ids[row, : engine.states.num_tokens[row]].tolist() for row in rows]
        proposed.extend((t, [d for d in own if d >= 0]) for t, own in zip(texts, drafts.tolist(), strict=True))
        return drafts

    drafter.propose = recorded
    assert results(engine, prompts) == want
    found = [(text, drafts) for text, drafts in proposed if len(drafts) == 3]
    assert len(found) > 30
    for text, drafts in found[::11]:
        assert drafts == drafts_of(model, text, 3)
    assert engine.speculation.stats.num_drafted > 60
    engine.close()
    cached = engine_of(model, kind, async_scheduling=async_scheduling, **options)
    assert [results(cached, prompts), results(cached, prompts)] == [want, want]
    cached.close()


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_head_in_a_gguf_file_is_that_of_the_directory(name, tmp_path):
    """The layer of the head is counted as one of the model there."""
    want, model = with_head(tmp_path, name), with_head(tmp_path, name, form="gguf")
    assert model.spec.num_layers == want.spec.num_layers
    head, found = want.head(), model.head()
    assert found.weights.keys() == head.weights.keys()
    for one in ("token_norm", "hidden_norm", "projection"):
        np.testing.assert_allclose(getattr(found, one).dequantize(), getattr(head, one).dequantize(), rtol=1e-6)
    for key, tensor in head.weights.items():
        np.testing.assert_allclose(found.weights[key].dequantize(), tensor.dequantize(), rtol=1e-6, atol=1e-7)
    prompts = prompts_of(model)
    options = {"speculation": "head", "speculation_num_tokens": 3, "speculation_adaptive": False}
    plain, engine = engine_of(model, KIND), engine_of(model, KIND, **options)
    assert results(plain, prompts) == results(engine, prompts)
    assert engine.speculation.stats.num_drafted > 60


def test_a_head_in_a_gguf_file_without_a_norm_of_its_own_has_that_of_the_model(tmp_path):
    model = with_head(tmp_path, "qwen3_5", drop="mtp.norm.weight", form="gguf")
    own, whole = (weights["final_norm"].dequantize() for weights in (model.head().weights, model.weights))
    np.testing.assert_array_equal(own, whole)


@pytest.mark.long
def test_the_cache_of_a_head_has_the_requests_that_are_there(tmp_path):
    model = with_head(tmp_path, "qwen3_5")
    engine = engine_of(model, "numpy", speculation="head", speculation_adaptive=False)
    drafter = engine.speculation.drafter
    for _ in range(2):
        results(engine, prompts_of(model))
        assert len(drafter.states) <= 4
    engine.add_request("a", [5, 6], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    assert len(drafter.states) == 1
    assert drafter.cache.pool.num_free == drafter.cache.pool.num_blocks - 1 - int(drafter.states.live.sum())


def test_a_head_that_is_wrong_computes_nothing_until_all_requests_are_probed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "PROBE_COST", 0.06)  # a head is a large part of so small a model
    model = with_head(tmp_path, "qwen3_5")
    engine = engine_of(model, "numpy", speculation="head", max_num_seqs=2, prefix_caching=False)
    monkeypatch.setattr(engine.speculation, "clock", lambda: 0.0)
    drafter, runs = engine.speculation.drafter, []
    monkeypatch.setattr(drafter, "_run", recorded(runs, engine, drafter._run))
    for name in "ab":
        engine.add_request(name, [5, 6, ord(name) % 9], SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True))
    run(engine)
    period = engine.speculation.probes.period
    assert probes.PROBE_EVERY < period < 30
    assert [step for step in runs if step > 6] == [*range(period, period + probes.PROBED)]


def test_probes_are_as_rare_as_their_measured_time_demands():
    """Four steps that each take as long as half a step of the target are 0.5 % of 400 steps."""
    probing = probes.Probes(0.01, follows=True)
    due = []
    for _ in range(900):
        probing.num_steps += 1
        if probing.are_due:
            due.append(probing.num_steps)
        probing.measure(1.0, 0.5 if probing.are_due else 0.0)
    assert probing.period == probes.PROBE_EVERY
    assert due == [1, 2, 3, *range(300, 304), *range(700, 704)]


def recorded(steps, engine, call):
    def called(*arguments):
        steps.append(engine.speculation.probes.num_steps)
        return call(*arguments)

    return called


def test_a_row_whose_removal_was_interrupted_is_named_again():
    states = RequestStates(max_num_reqs=3, max_model_len=8, vocab_size=9, kv_groups=[KVGroup(8)])
    gone = GoneRows(states)
    rows = [states.add_request(NewRequest(name, [1, 2], [[i + 1]])) for i, name in enumerate("abc")]
    for name in "ac":
        states.remove_request(name)
    assert next(gone.take()) == rows[0]
    assert (list(gone.take()), list(gone.take())) == ([rows[0], rows[2]], [])


@pytest.mark.skipif("torch" not in FLOATS, reason="needs torch")
def test_a_head_follows_a_model_that_processes_divide(tmp_path):
    model = with_head(tmp_path, "qwen3_5")
    prompts, stats = prompts_of(model)[1:3], []
    options = {"speculation": "head", "speculation_num_tokens": 3, "speculation_adaptive": False}
    for chosen in ({}, {"tensor_parallel_size": 2}):
        engine = engine_of(model, "torch", chosen, **options)
        stats.append((results(engine, prompts), engine.speculation.stats.num_drafted_at.tolist()))
        engine.close()
    assert stats[0] == stats[1]
    assert sum(stats[0][1]) > 30


def test_a_head_that_is_right_saves_steps(tmp_path):
    """Without what mixers and MLPs add, the next token follows from the last one, which this head looks at alone."""
    shapes = TINY["qwen3_5"]["shapes"] | head_shapes("qwen3_5")
    tensors = random_tensors(shapes)
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "norm_embedding.weight")):
            tensors[name][:] = 0
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"]
    tensors["mtp.fc.weight"] = np.eye(*shapes["mtp.fc.weight"], dtype="<f4")
    model = load_model(write_model(tmp_path / "bigrams", TINY["qwen3_5"]["config"], tensors))
    for temperature in (0.0, 0.8):
        plain, engine = (
            engine_of(model, "numpy"),
            engine_of(model, "numpy", speculation="head", speculation_adaptive=False),
        )
        assert results(plain, prompts_of(model), temperature) == results(engine, prompts_of(model), temperature)
        stats = engine.speculation.stats
        assert stats.num_drafted
        assert temperature or (stats.acceptance_rate == 1.0 and stats.mean_tokens_per_step > 3)


def test_a_head_is_part_of_the_footprint(tmp_path):
    model = model_of(with_head(tmp_path, "qwen3_5"), KINDS["numpy"], KINDS["numpy"].read_options({}))
    settings = {"max_num_seqs": 2, "max_model_len": 64}
    plain, drafting = (
        footprint(model, engine_config(settings | more), budget=None) for more in ({}, {"speculation": "head"})
    )
    assert plain.draft == 0
    assert drafting.draft > model.head().weights["embed"].stored.nbytes


def test_a_model_without_a_head_and_a_head_without_a_weight_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="qwen3_5 has no head for further tokens"):
        engine_of(load_model(make(tmp_path, "qwen3_5")), "numpy", speculation="head")
    for name in ("mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.self_attn.k_norm.weight"):
        model = with_head(tmp_path, "qwen3_5", drop=name)
        with pytest.raises(ModelError, match=rf"tensor {name} .*missing"):
            engine_of(model, "numpy", speculation="head")
        engine_of(model, "numpy").close()
