"""Real models against results recorded from transformers for the same files, in float32."""

import json
from pathlib import Path

import numpy as np
import pytest

from foreword.models.loader import load_model
from models.running import EXECUTORS, all_logits, in_chunks, log_probs, whole

DATA = Path(__file__).parents[1] / "data" / "models"
pytestmark = pytest.mark.model


def golden(name):
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_model(smollm2_path)


@pytest.fixture(scope="module")
def qwen(qwen_path):
    return load_model(qwen_path)


@pytest.fixture(scope="module")
def gemma3(gemma3_path):
    return load_model(gemma3_path)


@pytest.fixture
def model(request):
    return request.getfixturevalue(request.param)


MODELS = [("smollm2", "smollm2"), ("qwen", "qwen2.5-coder-0.5b"), ("gemma3", "gemma3-270m")]


@pytest.mark.parametrize(("model", "name"), MODELS, indirect=["model"])
def test_prompts_are_rendered_and_tokenised_as_recorded(model, name):
    for result in golden(name)["results"]:
        if result["rendered"] != result["prompt"]:
            text = model.tokenizer.apply_chat_template([{"role": "user", "content": result["prompt"]}])
            assert text == result["rendered"]
            assert model.tokenizer.encode(text, add_special_tokens=False) == result["prompt_ids"]
        else:
            assert model.tokenizer.encode(result["prompt"]) == result["prompt_ids"]
        assert model.tokenizer.decode(result["output_ids"], skip_special_tokens=False) == result["output_text"]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("model", "name"), MODELS, indirect=["model"])
def test_greedy_tokens_and_log_probabilities_equal_those_of_transformers(model, name, executor):
    """The recorded tokens are the input; all prompts share steps of uneven chunks."""
    results = golden(name)["results"]
    texts = [r["prompt_ids"] + r["output_ids"][:-1] for r in results]
    all_of_them = all_logits(model, texts, in_chunks(texts, [40, 1, 17]), executor)
    for result, logits in zip(results, all_of_them, strict=True):
        logits = logits[len(result["prompt_ids"]) - 1 :]
        sure = np.array(result["top1_top2_logit_margin"]) > 0.05
        np.testing.assert_array_equal(logits.argmax(-1)[sure], np.array(result["output_ids"])[sure])
        np.testing.assert_allclose(log_probs(logits, result["output_ids"]), result["logprobs"], atol=1e-3)
        if result["finish"] == "eos":
            assert result["output_ids"][-1] in model.eos_token_ids


UNEVEN = [512, 1, 77, 16]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("executor", "sizes", "first"),
    [(name, sizes, first) for name in EXECUTORS if name != "numpy" for sizes, first in ((UNEVEN, 0), (None, 800))]
    + [("numpy", UNEVEN, 800)],
)
def test_a_long_text_gives_the_results_of_transformers_in_any_chunks(smollm2, executor, sizes, first):
    """Log-probabilities of 1,200 positions, and the best token at each of the 24 greedy steps after them.

    first: the first position that is compared. Later ones read the keys and values of all before them.
    """
    want = golden("smollm2_long1200")
    text, outputs = want["prompt_ids"], want["output_ids"]
    texts = [text + outputs[:-1]]
    chunks = whole(texts) if sizes is None else in_chunks(texts, sizes)
    [logits] = all_logits(smollm2, texts, chunks, executor, first_position=first)
    prompt, greedy = logits[: 1199 - first], logits[1199 - first :]
    np.testing.assert_allclose(log_probs(prompt, text[first + 1 :]), want["prompt_logprobs"][first:], atol=1e-3)
    sure = np.array(want["top1_top2_logit_margin"]) > 0.05
    np.testing.assert_array_equal(greedy.argmax(-1)[sure], np.array(outputs)[sure])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_text_longer_than_the_sliding_window_gives_the_results_of_transformers(gemma3, executor):
    """The last 400 of 1,200 positions, which exceed the window of 512, in sliding and full layers."""
    want = golden("gemma3-270m_long1200")
    text = want["prompt_ids"]
    [logits] = all_logits(gemma3, [text], in_chunks([text], [500, 37]), executor, first_position=800)
    np.testing.assert_allclose(log_probs(logits[:-1], text[801:]), want["prompt_logprobs"][800:], atol=1e-3)


def test_a_model_without_a_chat_template_refuses_messages(gemma3):
    from foreword.errors import RequestError

    with pytest.raises(RequestError, match="no chat template"):
        gemma3.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
