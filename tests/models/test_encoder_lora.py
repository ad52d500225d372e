"""Adapters of encoders, against models with merged weights, W + scale · B A, and against the vectors of PEFT."""

import json
from pathlib import Path

import numpy as np
import pytest

from foreword import LLM, PoolingParams
from foreword.errors import ModelError, RequestError
from foreword.models.families import ENCODER_FAMILIES
from models.encoder_lora_cases import CASES, factors_of, write_case
from models.lora_files import merged, write_peft
from models.pooling_models import POOLING, make_pooling
from models.running import FLOATS
from models.tiny import random_tensors, write_model

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "models" / "encoder_lora.json").read_text())
ENCODERS = [
    name
    for name, tiny in POOLING.items()
    if tiny["config"]["model_type"] in ENCODER_FAMILIES and "mean" in tiny["texts"][0]
]
MEAN = PoolingParams(pooling="mean", normalize=False)


def texts_of(name):
    return [text["token_ids"] for text in POOLING[name]["texts"]]


def load(folder, executor="numpy", **options):
    own = {key: value for key, value in FLOATS[executor].items() if key != "kv_format"}
    return LLM(str(folder), executor=executor, **{**own, **options})


def as_peft(folder, factors, **config):
    return str(write_peft(folder, factors, **{"task_type": "FEATURE_EXTRACTION", **config}))


@pytest.mark.parametrize("executor", FLOATS)
@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_are_those_of_merged_weights_in_one_batch_of_several_adapters(tmp_path, name, executor):
    tiny, texts = POOLING[name], texts_of(name)
    adapters, want = {}, {}
    for key, seed in (("one", 1), ("two", 2)):
        factors = factors_of(name, seed)
        adapters[key] = as_peft(tmp_path / key, factors)
        tensors = merged(random_tensors(tiny["shapes"]), factors, 2.0)
        with load(write_model(tmp_path / f"merged-{key}", tiny["config"], tensors)) as llm:
            want[key] = llm.embed(texts, MEAN)
    with load(make_pooling(tmp_path, name), executor, loras=adapters) as llm:
        want[None] = llm.embed(texts, MEAN)
        names = [key for key in ("one", "two", None) for _ in texts]
        got = llm.embed(texts * 3, MEAN, lora=names)
        alone = llm.embed(texts[:1], MEAN, lora="two")
    for vector, key, i in zip(got, names, range(len(names)), strict=True):
        np.testing.assert_allclose(vector, want[key][i % len(texts)], rtol=1e-4, atol=1e-4)
    if executor == "native":
        np.testing.assert_array_equal(alone[0], got[len(texts)])
    assert np.abs(want["one"][0] - want[None][0]).max() > 1e-2


@pytest.mark.parametrize("executor", FLOATS)
@pytest.mark.parametrize("name", CASES)
def test_vectors_equal_those_that_peft_computes(tmp_path, name, executor):
    model, _ = CASES[name]
    adapter = write_case(tmp_path / "adapter", CASES[name])
    with load(make_pooling(tmp_path, model), executor, loras={"a": str(adapter)}) as llm:
        vectors = llm.embed(texts_of(model), MEAN, lora="a")
    for vector, recorded in zip(vectors, RECORDED[name], strict=True):
        np.testing.assert_allclose(vector, recorded, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif("native" not in FLOATS, reason="the native module is not built")
@pytest.mark.parametrize("weight_format", ["auto", "int8", "bf16"])
def test_each_weight_format_takes_adapters_and_vectors_do_not_depend_on_the_batch(tmp_path, weight_format):
    small = {module: (0.3 * a, b) for module, (a, b) in factors_of("bert").items()}
    texts, adapter = texts_of("bert"), as_peft(tmp_path / "a", small)
    with load(make_pooling(tmp_path, "bert"), loras={"a": adapter}) as llm:
        want = llm.embed(texts, MEAN, lora="a")
    with LLM(str(tmp_path / "bert"), loras={"a": adapter}, weight_format=weight_format) as llm:
        both = llm.embed(texts * 2, MEAN, lora=["a"] * len(texts) + [None] * len(texts))
        for i, text in enumerate(texts):
            [alone], [plain] = llm.embed([text], MEAN, lora="a"), llm.embed([text], MEAN)
            np.testing.assert_array_equal(both[i], alone)
            np.testing.assert_array_equal(both[len(texts) + i], plain)
            np.testing.assert_allclose(alone, want[i], atol=0.1)
            assert np.abs(alone - plain).max() > 0.1


def test_adapters_of_a_classifier_whose_names_begin_as_its_files_have_them(tmp_path):
    factors = {f"bert.{module}": both for module, both in factors_of("bert").items()}
    text = texts_of("bert-classifier")[0]
    with load(make_pooling(tmp_path, "bert-classifier"), loras={"a": as_peft(tmp_path / "a", factors)}) as llm:
        changed, plain = (llm.classify([text], lora=lora)[0].outputs.probs for lora in ("a", None))
    tensors = merged(random_tensors(POOLING["bert-classifier"]["shapes"]), factors, 2.0)
    with load(write_model(tmp_path / "merged", POOLING["bert-classifier"]["config"], tensors)) as llm:
        np.testing.assert_allclose(changed, llm.classify([text])[0].outputs.probs, atol=1e-5)
    assert np.abs(np.subtract(changed, plain)).max() > 1e-3


def test_the_layer_that_no_vector_reads_may_be_changed_unless_a_classifier_reads_it(tmp_path):
    a, b = np.ones((4, 32), np.float32), np.ones((32, 4), np.float32)
    adapter = as_peft(tmp_path / "a", {**factors_of("bert"), "pooler.dense": (a, b)})
    with load(make_pooling(tmp_path, "bert"), loras={"a": adapter}) as llm:
        assert llm.embed(texts_of("bert"), lora="a")
    with pytest.raises(ModelError, match=r"changes pooler\.dense, which is not supported for this model"):
        load(make_pooling(tmp_path, "bert-classifier"), loras={"a": adapter})


def test_what_encoders_do_not_take_is_refused_by_name(tmp_path):
    factors, folder = factors_of("bert"), make_pooling(tmp_path, "bert")
    with pytest.raises(ModelError, match="task_type 'SEQ_CLS' is not supported"):
        load(folder, loras={"a": as_peft(tmp_path / "a", factors, task_type="SEQ_CLS")})
    embedding = {**factors, "embeddings.word_embeddings": (np.ones((4, 32)), np.ones((48, 4)))}
    with pytest.raises(ModelError, match=r"changes embeddings\.word_embeddings, which is not supported"):
        load(folder, loras={"a": as_peft(tmp_path / "b", embedding)})
    (tmp_path / "adapter.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ModelError, match=r"adapter\.gguf: is not a directory\. Encoders take adapters in PEFT's format"
    ):
        load(folder, loras={"a": str(tmp_path / "adapter.gguf")})
    with load(folder) as llm, pytest.raises(RequestError, match="is not the name of an adapter"):
        llm.embed(texts_of("bert"), lora="a")
