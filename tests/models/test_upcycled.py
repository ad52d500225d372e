"""A mixture of experts that are all the dense MLP equals the dense model, whatever the router chooses."""

from dataclasses import replace

import numpy as np
import pytest

from foreword import LLM, SamplingParams
from foreword.models.loader import load_model
from foreword.native import available
from models import upcycled
from models.running import EXECUTORS, all_logits, in_chunks

pytestmark = pytest.mark.model

LAYERS, EXPERTS = 2, 4


@pytest.fixture(scope="module")
def files(smollm2_path, tmp_path_factory):
    """The dense model and one with two experts per token."""
    folder = tmp_path_factory.mktemp("upcycled")
    dense = upcycled.write(folder / "dense.gguf", smollm2_path, LAYERS)
    return dense, upcycled.write(folder / "experts.gguf", smollm2_path, LAYERS, EXPERTS, 2)


@pytest.fixture(scope="module")
def experts(files):
    return load_model(files[1])


@pytest.fixture(scope="module")
def texts():
    random = np.random.default_rng(0)
    return [random.integers(0, 49152, length).tolist() for length in (1, 7, 40, 23)]


@pytest.fixture(scope="module")
def dense_logits(files, texts):
    return {name: all_logits(load_model(files[0]), texts, in_chunks(texts, [9, 1]), name) for name in EXECUTORS}


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("experts_per_token", "norm_topk"), [(1, True), (2, True), (3, True), (EXPERTS, False)])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_its_logits_are_those_of_the_dense_model(experts, texts, dense_logits, executor, experts_per_token, norm_topk):
    model = experts
    assert all(layer.moe.num_experts == EXPERTS for layer in model.spec.layers)
    layers = tuple(
        replace(layer, moe=replace(layer.moe, experts_per_token=experts_per_token, norm_topk=norm_topk))
        for layer in model.spec.layers
    )
    model = replace(model, spec=replace(model.spec, layers=layers))
    got = all_logits(model, texts, in_chunks(texts, [9, 1]), executor)
    for one, want in zip(got, dense_logits[executor], strict=True):
        np.testing.assert_allclose(one, want, atol=2e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_router_chooses(experts, texts, executor):
    """Without one expert of the last layer, the logits change at some positions: where the router chose it."""
    model, text = experts, texts[2]
    name = f"layers.{LAYERS - 1}.experts.0.down"
    zeros = replace(model.weights[name], stored=np.zeros_like(model.weights[name].data))
    [want], [got] = (
        all_logits(replace(model, weights={**model.weights, **some}), [text], in_chunks([text], [40]), executor)
        for some in ({}, {name: zeros})
    )
    assert 0 < (np.abs(got - want).max(-1) > 1e-3).sum() < len(text)


@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_it_answers_as_the_dense_model_alone_and_in_a_crowd(files):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["The capital of France is", "def add(a, b):", "Once upon a time, there was", "1 2 3 4 5"]
    answers = []
    for file in files:
        with LLM(str(file), max_model_len=256) as llm:
            crowd = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            assert crowd == [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
            answers.append(crowd)
    assert answers[0] == answers[1]
