"""Embeddings, scores, rankings and classes over HTTP."""

import base64
import threading
from pathlib import Path

import numpy as np
import pytest
from server_rig import serving

import openai
from foreword import LLM, PoolingParams
from foreword.engine.pooling import ScorePlan
from foreword.server.reply import MANY
from models.pooling_models import POOLING, make_pooling

TOKENS = [text["token_ids"] for text in POOLING["bert"]["texts"]]
TEXTS = ["\x04\x05\x06", "\x07\x08", "\x04\x05\x06"]
SHORT = {"engine": {"max_model_len": 24}}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_pooling(folder, name) for name in ("bert", "bert-classifier", "bert-cross-encoder")}


@pytest.fixture(scope="module")
def embedder(models):
    with serving(models["bert"], **SHORT, max_requests=16) as server:
        yield server
        server.check_nothing_is_left()


@pytest.fixture(scope="module")
def vectors(models):
    """The inputs are token ids and texts."""
    with LLM(str(models["bert"]), executor="numpy") as llm:
        return np.array(llm.embed(TOKENS)), np.array(llm.embed(TEXTS))


def test_embeddings_of_texts_and_tokens_one_or_many(embedder, vectors):
    of_tokens, of_texts = vectors
    for given, want in ((TEXTS, of_texts), (TEXTS[0], of_texts[:1]), (TOKENS, of_tokens), (TOKENS[1], of_tokens[1:])):
        body = embedder.post("/v1/embeddings", {"model": "talker", "input": given}).json()
        assert [one["index"] for one in body["data"]] == list(range(len(want)))
        np.testing.assert_allclose([one["embedding"] for one in body["data"]], want, atol=1e-6)
        assert body["object"] == "list"
        assert body["model"] == "talker"
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def test_the_openai_client_reads_embeddings(embedder, vectors):
    client = openai.OpenAI(base_url=embedder.url + "/v1", api_key="none")
    found = client.embeddings.create(model="talker", input=TEXTS)  # asks for base64
    np.testing.assert_allclose([one.embedding for one in found.data], vectors[1], atol=1e-6)


def test_embeddings_in_base64_with_fewer_dimensions_or_of_any_length(embedder, vectors):
    body = {"input": TEXTS[0], "encoding_format": "base64", "dimensions": 5}
    [one] = embedder.post("/v1/embeddings", body).json()["data"]
    got = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
    want = vectors[1][0][:5] / np.linalg.norm(vectors[1][0][:5])
    np.testing.assert_allclose(got, want, atol=1e-6)
    [one] = embedder.post("/v1/embeddings", {"input": TEXTS[0], "normalize": False}).json()["data"]
    assert np.linalg.norm(one["embedding"]) != pytest.approx(1, abs=1e-3)
    long = [5] * 30
    body = embedder.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1}).json()
    assert body["usage"]["prompt_tokens"] == 24


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {}, "input", "is missing"),
        ("/v1/embeddings", {"input": []}, "input", "expected a string"),
        ("/v1/embeddings", {"input": [["a"]]}, "input[0]", "expected"),
        ("/v1/embeddings", {"input": [5] * 30}, "input", "is too long"),
        ("/v1/embeddings", {"input": [48]}, "input[0]", "must be in"),
        ("/v1/embeddings", {"input": [5], "dimensions": 33}, "dimensions", "the model has 32"),
        (
            "/v1/embeddings",
            {"input": [5], "encoding_format": "int8"},
            "encoding_format",
            "expected 'float' or 'base64'",
        ),
        ("/v1/embeddings", {"input": [5], "dimension": 4}, "dimension", "Did you mean 'dimensions'"),
        ("/v1/completions", {"prompt": [5]}, "params", "computes no logits"),
        ("/score", {"text_1": "a"}, "text_2", "is missing"),
        ("/score", {"text_1": TEXTS[:2], "text_2": TEXTS}, "text_2", "2 texts of text_1 do not pair"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "do not pair"),
        ("/rerank", {"query": "a", "documents": [{"image": 1}]}, "documents", "expected a list of texts"),
        ("/rerank", {"query": "a", "documents": TEXTS, "top_n": 0}, "top_n", "must be 1 or more"),
    ],
)
def test_what_cannot_be_served_is_refused_by_field(embedder, path, body, param, message):
    response = embedder.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert message in response.json()["error"]["message"]
    assert embedder.post("/v1/embeddings", {"input": TOKENS[0]}).status_code == 200


def test_an_embedding_model_scores_by_cosines_and_ranks(embedder, vectors):
    want = (vectors[1] @ vectors[1][0]).tolist()
    body = embedder.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    assert [one["score"] for one in body["data"]] == pytest.approx(want, abs=1e-6)
    body = embedder.post("/v1/rerank", {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}]}).json()
    assert [one["index"] for one in body["results"]] == [1, 0]
    assert body["results"][0]["document"] == {"text": TEXTS[2]}
    assert body["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-6)
    best = {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1, "return_documents": False}
    assert [sorted(one) for one in embedder.post("/v2/rerank", best).json()["results"]] == [
        ["index", "relevance_score"]
    ]
    assert embedder.post("/classify", {"input": TEXTS[0]}).status_code == 404


def test_scores_with_many_tokens_are_made_outside_the_event_loop(embedder, monkeypatch):
    threads, read = [], ScorePlan.read
    monkeypatch.setattr(ScorePlan, "read", lambda *args: threads.append(threading.current_thread()) or read(*args))
    embedder.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1]})
    embedder.post("/score", {"text_1": "\x04" * 20, "text_2": ["\x05"] * (MANY // 20)})
    assert threads[0] is not threads[1]
    assert threads[1].name.startswith(("asyncio", "uvloop", "ThreadPoolExecutor"))  # the name depends on the loop


def test_a_cross_encoder_scores_pairs(models):
    with LLM(str(models["bert-cross-encoder"]), executor="numpy") as llm:
        want = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:])]
    with serving(models["bert-cross-encoder"], **SHORT) as server:
        body = server.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
        assert [one["score"] for one in body["data"]] == pytest.approx(want, abs=1e-6)
        server.check_nothing_is_left()


def test_a_classifier_names_the_likeliest_label(models):
    with LLM(str(models["bert-classifier"]), executor="numpy") as llm:
        [want] = llm.encode([TOKENS[0]], PoolingParams(task="classify"))
    with serving(models["bert-classifier"], **SHORT) as server:
        [one] = server.post("/classify", {"input": TOKENS[0]}).json()["data"]
        assert one["probs"] == pytest.approx(want.outputs.probs, abs=1e-6)
        assert one["label"] == f"LABEL_{int(np.argmax(want.outputs.probs))}"
        assert one["num_classes"] == 3
        assert server.post("/score", {"text_1": "a", "text_2": "b"}).status_code == 404


def test_embeddings_and_text_come_from_one_server(talker):
    with serving(talker) as server:
        [one] = server.post("/v1/embeddings", {"input": "Hi"}).json()["data"]
        assert np.linalg.norm(one["embedding"]) == pytest.approx(1, abs=1e-5)
        assert (
            server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).json()["usage"]["completion_tokens"] == 2
        )
        server.check_nothing_is_left()


def test_a_full_server_refuses_more_texts(embedder):
    with embedder.context_is_full():
        assert embedder.post("/v1/embeddings", {"input": TEXTS}).status_code == 429
