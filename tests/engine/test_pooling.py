"""Pooling requests in the engine: chunks, preemption, overlap, mixing with generation, and refusals."""

import asyncio

import numpy as np
import pytest
from engine_rig import make_engine
from test_grammar import Circle

from computing import replace_compute
from foreword import LLM, PoolingParams, SamplingParams
from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.engine.async_llm import AsyncLLM
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError, EngineError, PlanError, RequestError
from foreword.executors.encoder import EncoderExecutor
from foreword.models.loader import load_model
from foreword.native import available
from models.pooling_models import POOLING, make_pooling
from models.recorded import make

TEXTS = [np.random.default_rng(n).integers(3, 48, n).tolist() for n in (20, 3, 11, 1, 17)]
OPTIONS = {"executor": "numpy", "max_model_len": 24, "block_size": 4, "num_blocks": 64, "check": "full"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
VECTORS = [PoolingParams(pooling=pooling, normalize=False) for pooling in ("last", "cls", "mean")]


@pytest.fixture
def folder(tmp_path):
    """A decoder with logits."""
    return str(make(tmp_path, "qwen3"))


@pytest.fixture
def classifier(tmp_path):
    return str(make_pooling(tmp_path, "qwen2-classifier"))


def all_states(folder, texts):
    """The hidden states of every token, each text alone in one step."""
    with LLM(folder, **OPTIONS) as llm:
        whole = PoolingParams(task="token_embed", normalize=False)
        return [llm.encode([text], whole)[0].outputs.data for text in texts]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 7, "async_scheduling": True},
        {"num_blocks": 9, "max_num_batched_tokens": 8, "reserve_full_prompt": False, "watermark": 0.0},
        {"speculation": None, "prefix_caching": False},
    ],
    ids=["whole", "chunks", "overlap", "preemption", "no cache"],
)
def test_poolings_are_those_of_the_states_of_all_tokens(folder, options):
    states = all_states(folder, TEXTS)
    with LLM(folder, **{**OPTIONS, **options}) as llm:
        for _ in range(2):  # the second time with cached prefixes
            for params in VECTORS:
                for vector, own in zip(llm.embed(TEXTS, params), states, strict=True):
                    want = {"last": own[-1], "cls": own[0], "mean": own.astype(np.float64).mean(0)}[params.pooling]
                    assert vector.dtype == np.float32
                    # NumPy's products round differently in steps of other sizes
                    np.testing.assert_allclose(vector, want, atol=1e-5)
        assert llm.engine.cache.pool.num_used == 0
        assert not llm.engine.has_work


@pytest.mark.one_in(2)
@pytest.mark.skipif(not available(), reason="the native module is not built")
@pytest.mark.parametrize("params", VECTORS, ids=lambda params: params.pooling)
def test_chunks_and_other_texts_change_no_bit_of_a_native_vector(folder, params):
    options = {**OPTIONS, "executor": "native"}
    with LLM(folder, **options) as llm:
        alone = [llm.embed([text], params)[0] for text in TEXTS]
    with LLM(folder, **{**options, "max_num_batched_tokens": 5}) as llm:
        np.testing.assert_array_equal(llm.embed(TEXTS, params), alone)


def test_embeddings_are_cut_to_their_dimensions_then_normalised(folder):
    states = all_states(folder, TEXTS)
    with LLM(folder, **OPTIONS) as llm:
        for vector, own in zip(llm.embed(TEXTS, PoolingParams(dimensions=5)), states, strict=True):
            np.testing.assert_allclose(vector, own[-1][:5] / np.linalg.norm(own[-1][:5]), atol=1e-6)
        [tokens] = llm.encode([TEXTS[0]], PoolingParams(task="token_embed"))
        np.testing.assert_allclose(np.linalg.norm(tokens.outputs.data, axis=1), 1, atol=1e-6)
        assert tokens.outputs.data.shape == (20, 32)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("speculation", ["plain", "ngram", "draft_model"])
@pytest.mark.parametrize("overlap", [False, True])
def test_pooling_and_generation_share_steps_and_disturb_neither(folder, overlap, speculation):
    options = {**OPTIONS, "max_num_batched_tokens": 9, "async_scheduling": overlap}
    if speculation != "plain":
        model = folder if speculation == "draft_model" else None
        options["speculation"] = SpeculationConfig(method=speculation, num_tokens=3, model=model)
    mean = PoolingParams(pooling="mean")
    with LLM(folder, **options) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(TEXTS, GREEDY)]
        vectors = llm.embed(TEXTS, mean)
        for i, text in enumerate(TEXTS):
            llm.engine.add_request(f"text {i}", text, GREEDY)
            llm.engine.add_request(f"vector {i}", text, mean)
        outputs = {}
        while llm.engine.has_work:
            outputs |= {output.request_id: output for output in llm.engine.step()}
        for i, (wanted, vector) in enumerate(zip(tokens, vectors, strict=True)):
            assert outputs[f"text {i}"].outputs[0].token_ids == wanted
            output = outputs[f"vector {i}"]
            np.testing.assert_allclose(output.pooled, vector, atol=1e-6)
            assert output.outputs[0].token_ids == []
            assert output.outputs[0].finish_reason == "stop"
            assert output.usage.completion_tokens == 0


def test_a_prompt_may_fill_the_whole_length(folder):
    with LLM(folder, **OPTIONS) as llm:
        text = [5] * 24
        assert len(llm.embed([text])) == 1
        with pytest.raises(RequestError, match="'25 tokens': is too long: max_model_len is 24"):
            llm.embed([[*text, 5]])
        [kept] = llm.encode([[*text, 5]], PoolingParams(truncate_prompt_tokens=-1))
        assert kept.prompt_token_ids == text
        [kept] = llm.encode([text], PoolingParams(truncate_prompt_tokens=3))
        assert kept.prompt_token_ids == text[:3]


def test_embeddings_as_prompt_are_pooled_as_their_tokens(folder, tmp_path):
    with LLM(folder, **OPTIONS) as llm:
        rows = llm.model.weights["embed"].dequantize()[TEXTS[0]]
        given = {"prompt_embeds": rows}
        for params in VECTORS:
            [want], [got] = llm.embed([TEXTS[0]], params), llm.embed([given], params)
            np.testing.assert_allclose(got, want, atol=2e-6)
        with pytest.raises(RequestError, match="cannot be cut"):
            llm.embed([given], PoolingParams(truncate_prompt_tokens=3))
    encoder = str(make_pooling(tmp_path, "bert"))
    with LLM(encoder, executor="numpy") as llm, pytest.raises(RequestError, match=r"Capability\.PROMPT_EMBEDS"):
        llm.embed([given])


def test_a_step_reward_is_given_at_the_tags(classifier):
    tag, text = 7, [3, 4, 7, 5, 6, 9, 7, 8]
    params = PoolingParams(pooling="step", step_tag_id=tag)
    with LLM(classifier, **OPTIONS, max_num_batched_tokens=3) as llm:
        [steps] = llm.reward([text], params)
        assert steps.outputs.data.shape == (2, 3)
        for row, end in zip(steps.outputs.data, (3, 7), strict=True):
            [one] = llm.reward([text[:end]])
            np.testing.assert_allclose(row, one.outputs.data, atol=2e-6)
        with pytest.raises(RequestError, match="step_tag_id = 7: is not in the prompt"):
            llm.reward([[3, 4]], params)


def test_a_classifier_gives_no_text_and_a_text_model_no_labels(folder, classifier):
    with LLM(classifier, **OPTIONS) as llm:
        assert llm.model.pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        assert sum(llm.classify([TEXTS[0]])[0].outputs.probs) == pytest.approx(1)
        with pytest.raises(RequestError, match="the model computes no logits"):
            llm.generate([TEXTS[0]])
    with LLM(folder, **OPTIONS) as llm, pytest.raises(RequestError, match="task = 'classify': the model does embed"):
        llm.classify([TEXTS[0]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "rank"}, "task = 'rank': the model does embed, token_embed"),
        ({"pooling": "max"}, "pooling = 'max': must be one of"),
        ({"pooling": "all"}, "pooling = 'all': embed has one result"),
        ({"task": "token_embed", "pooling": "mean"}, "pooling = 'mean': gives no state of each token"),
        ({"normalize": 1}, "normalize = 1: must be a bool"),
        ({"dimensions": 0}, "dimensions = 0: must be an int32 of at least 1"),
        ({"dimensions": 33}, "dimensions = 33: the model has 32"),
        ({"dimensions": "8"}, "dimensions = '8': must be an int32"),
        ({"task": "token_embed", "pooling": "step"}, "step_tag_id = None: belongs to pooling='step'"),
        ({"step_tag_id": 3}, "step_tag_id = 3: belongs to pooling='step'"),
        ({"first_text_len": -1}, "first_text_len = -1"),
        ({"first_text_len": 2}, "first_text_len = 2: the model does not distinguish texts of a pair"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens = 0: keeps no token"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(folder, values, message):
    with LLM(folder, **OPTIONS) as llm:
        with pytest.raises(RequestError, match=message):
            llm.encode([TEXTS[0]], PoolingParams(**values))
        assert not llm.engine.has_work


@pytest.mark.parametrize("value", [np.zeros((2, 2)), object(), 0.5, b"x", {1}], ids=type)
def test_a_value_of_any_other_type_is_refused(folder, value):
    with LLM(folder, **OPTIONS) as llm:
        calls = {
            "prompt_name": lambda: llm.embed([[5]], PoolingParams(prompt_name=value)),
            "pooling_params": lambda: llm.embed([[5]], value),
            "query|queries|text_1": lambda: llm.score(value, "a"),
            "document|text_2": lambda: llm.score("a", value),
            "suffix|prefix": lambda: llm.infill(value, value),
        }
        for name, call in calls.items():
            with pytest.raises(RequestError, match=name):
                call()


def test_a_grammar_is_refused(folder):
    with LLM(folder, **OPTIONS) as llm, pytest.raises(RequestError, match="a pooling request has no tokens"):
        llm.engine.add_request("a", TEXTS[0], PoolingParams(), grammar=Circle())


def test_an_executor_without_the_capability_is_refused():
    with pytest.raises(RequestError, match=r"OracleExecutor does not support pooling \(Capability.POOLING\)"):
        make_engine().add_request("a", [1, 2], PoolingParams())


def test_states_that_are_not_numbers_end_their_request_alone(folder):
    with LLM(folder, **OPTIONS) as llm:
        pool = llm.engine.executor.pooler.result
        llm.engine.executor.pooler.result = lambda params, states: (
            pool(params, states) * (np.nan if params.dimensions == 2 else 1)
        )
        outputs = llm.encode(TEXTS[:2], [PoolingParams(dimensions=2), PoolingParams()])
        assert "NaN or infinite hidden states" in str(outputs[0].error)
        with pytest.raises(RequestError, match="hidden states"):
            _ = outputs[0].outputs
        assert outputs[1].error is None
        with pytest.raises(RequestError, match="hidden states"):
            llm.embed(TEXTS[:1], PoolingParams(dimensions=2))


def test_a_failed_step_leaves_pooling_requests_waiting(folder):
    with LLM(folder, **OPTIONS, max_num_batched_tokens=6) as llm:
        want = llm.embed(TEXTS, PoolingParams(pooling="mean"))
        for i, text in enumerate(TEXTS):
            llm.engine.add_request(str(i), text, PoolingParams(pooling="mean"))
        compute, calls = llm.engine.executor.compute, []

        def fails(batch, indices):
            calls.append(batch.step)
            if len(calls) in (2, 5, 9):
                raise PlanError("broken")
            return compute(batch, indices)

        replace_compute(llm.engine.executor, fails)
        outputs = {}
        while llm.engine.has_work:
            try:
                outputs |= {output.request_id: output.pooled for output in llm.engine.step()}
            except PlanError:
                continue
        for i, vector in enumerate(want):
            np.testing.assert_allclose(outputs[str(i)], vector, atol=1e-6)


def test_an_aborted_request_has_no_result(folder):
    with LLM(folder, **OPTIONS, max_num_batched_tokens=6) as llm:
        llm.engine.add_request("a", TEXTS[0], PoolingParams())
        llm.engine.step()
        assert llm.engine.abort("a").pooled is None
        assert llm.engine.cache.pool.num_used == 0


def test_scores_of_an_embedding_model_are_cosines(tmp_path):
    folder = str(make_pooling(tmp_path, "bert"))
    query, documents = "\u0104\u0105", ["\u0106\u0107\u0108", "\u0104\u0105"]
    with LLM(folder, executor="numpy") as llm:
        vectors = llm.embed([query, *documents])
        scores = [output.outputs.score for output in llm.score(query, documents)]
        assert scores == pytest.approx([float(vectors[0] @ vectors[1]), 1.0], abs=1e-6)
        assert llm.score([query], documents)[0].prompt_token_ids
        with pytest.raises(RequestError, match="3 texts of queries do not pair with them"):
            llm.score([query] * 3, documents)
        with pytest.raises(RequestError, match=r"documents\[0\] = 7: must be a text"):
            llm.score(query, [7])


@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_of_an_encoder_runs_many_steps(tmp_path, overlap):
    folder = str(make_pooling(tmp_path, "roberta"))
    with LLM(folder, executor="numpy") as llm:
        want = llm.embed(TEXTS * 4)
    options = {"check": "full", "max_num_batched_tokens": 24, "max_num_seqs": 3, "async_scheduling": overlap}
    with LLM(folder, executor="numpy", **options) as llm:
        np.testing.assert_allclose(llm.embed(TEXTS * 4), want, atol=1e-6)
        assert llm.engine.cache.pool.num_used == 0
    with pytest.raises(ConfigError, match="speculation: the model generates nothing"):
        LLM(folder, executor="numpy", speculation=SpeculationConfig())


def test_a_part_of_a_text_is_no_input_of_an_encoder(tmp_path):
    model = load_model(make_pooling(tmp_path, "bert"))
    states = RequestStates(max_num_reqs=2, max_model_len=8, vocab_size=48, kv_groups=[KVGroup(8)])
    states.add_request(NewRequest("a", [3, 4, 5], [[1]], pooling_params=PoolingParams()))
    states.add_request(NewRequest("b", [3, 4], [[2]]))
    buffers = InputBuffers.for_states(states, 8)
    executor = EncoderExecutor(model.spec, model.weights, model.pooling)
    with pytest.raises(PlanError, match="computes whole texts"):
        executor.compute(prepare_inputs(states, {"a": 2}, buffers), np.zeros(0, np.int64))
    with pytest.raises(EngineError, match="every request needs pooling_params"):
        executor.compute(prepare_inputs(states, {"a": 3, "b": 2}, buffers), np.zeros(0, np.int64))


def test_an_encoder_computes_whole_texts_alone(tmp_path):
    folder = str(make_pooling(tmp_path, "bert"))
    with LLM(folder, executor="numpy", max_num_batched_tokens=8) as llm:
        assert llm.engine.config.scheduler.max_num_batched_tokens == 24
        assert len(llm.embed(TEXTS * 3)) == 15
        with pytest.raises(RequestError, match="the model computes no logits"):
            llm.generate([TEXTS[0]])
    with pytest.raises(ConfigError, match="max_model_len=25: the model was made for 24"):
        LLM(folder, executor="numpy", max_model_len=25)
    of_decoders = {"kv_format": "int8", "preallocate_kv": True, "numa_nodes": 2}
    of_decoders |= {"block_size": 4, "num_blocks": 9, "kv_cache_bytes": 5, "lora_bytes": 5}
    of_decoders |= {"max_forced_tokens": 3, "long_prefill_threshold": 3}
    for name, value in of_decoders.items():
        with pytest.raises(ConfigError, match=f"{name}={value!r}: only decoders have it"):
            LLM(folder, executor="native", **{name: value})


def test_results_of_several_numbers_are_no_score(classifier):
    with LLM(classifier, **OPTIONS) as llm, pytest.raises(EngineError, match="not one number"):
        _ = llm.classify([TEXTS[0]])[0].outputs.score
    with LLM(classifier, **OPTIONS) as llm, pytest.raises(RequestError, match="head has 3 outputs, not one"):
        llm.score("a", "b")


def test_many_coroutines_embed_at_the_same_time(folder):
    async def main():
        async with AsyncLLM(folder, **OPTIONS) as llm:
            outputs = await asyncio.gather(*(llm.encode(text) for text in TEXTS))
            scores = await llm.score("\u0104", ["\u0104", "\u0105"])
            np.testing.assert_allclose(await llm.embed(TEXTS[0]), outputs[0].outputs.data, atol=1e-6)
            return [output.outputs.embedding for output in outputs], scores

    embeddings, scores = asyncio.run(main())
    with LLM(folder, **OPTIONS) as llm:
        np.testing.assert_allclose(embeddings, llm.embed(TEXTS), atol=1e-6)
    assert scores[0].outputs.score == pytest.approx(1, abs=1e-6)


def test_a_cross_encoder_reads_both_texts(tmp_path):
    folder = str(make_pooling(tmp_path, "bert-cross-encoder"))
    assert POOLING["bert-cross-encoder"]["config"]["id2label"] == {"0": "LABEL_0"}
    with LLM(folder, executor="numpy") as llm:
        token_ids, first_len = llm.tokenizer.encode_pair("\x04\x05", "\x06")
        assert (token_ids, first_len) == ([4, 5, 6], 2)
        [output] = llm.score("\x04\x05", "\x06")
        [want] = llm.encode([token_ids], PoolingParams(task="score", first_text_len=first_len))
        assert output.outputs.score == want.outputs.score
        assert 0 < output.outputs.score < 1
