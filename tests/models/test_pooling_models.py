"""Encoders, classifiers and embedding decoders on tiny random models, against results recorded from transformers."""

import json

import numpy as np
import pytest

from foreword import LLM, PoolingParams
from foreword.errors import ConfigError, ModelError
from foreword.models.families import ENCODER_FAMILIES
from foreword.models.loader import load_model
from foreword.models.spec import DecoderSpec
from foreword.native import available
from foreword.server.loading import _fitted
from foreword.server.served import ServedModel
from models.gguf_models import write
from models.pooling_models import FIRST_TEXT_LEN, POOLING, make_pooling
from models.running import FLOATS
from models.tiny import random_tensors, write_model

OPTIONS = {"max_model_len": 24, "num_blocks": 64, "block_size": 4}
VECTORS = [name for name, tiny in POOLING.items() if "mean" in tiny["texts"][0]]
CLASSIFIERS = [name for name in POOLING if name not in VECTORS]


def sees_later(name):
    """Return whether a model is a decoder whose tokens see later ones."""
    return name.startswith(("eurobert", "embedding-gemma2")) or "bidirectional" in name


def load(folder, executor):
    options = dict(FLOATS[executor])
    spec = load_model(folder).spec
    if isinstance(spec, DecoderSpec) and not spec.is_causal:
        options |= OPTIONS
    elif isinstance(spec, DecoderSpec):
        options |= {**OPTIONS, "max_num_batched_tokens": 6}
    else:
        options.pop("kv_format", None)
    return LLM(str(folder), executor=executor, **options)


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


@pytest.mark.parametrize("name", ["prefix_caching", "chunked_prefill"])
@pytest.mark.parametrize("of", ["bert", "gemma3-bidirectional"])
def test_a_model_of_whole_texts_refuses_what_it_was_given_as_true_and_has_it_off(tmp_path, of, name):
    folder = make_pooling(tmp_path, of)
    with pytest.raises(ConfigError, match=f"^{name}=True: the model computes whole texts, .*; leave it out"):
        LLM(str(folder), executor="numpy", **{name: True})
    with LLM(str(folder), executor="numpy", **{name: False}) as llm:
        assert not llm.engine.cache.prefix_caching
        assert not llm.engine.scheduler.config.chunks_prompts
    served = ServedModel(model=str(folder), names=("x",), options={name: True}, common=frozenset({name}))
    assert _fitted(served)[1] == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("long_prefill_threshold", 3),
        ("prompt_time_share", 0.3),
        ("host_cache_bytes", 1 << 20),
        ("cache_dir", "/nowhere"),
    ],
)
def test_a_decoder_whose_tokens_see_later_ones_refuses_settings_of_parts_of_texts(tmp_path, name, value):
    """And a server of several models leaves out those that were given for all."""
    folder = make_pooling(tmp_path, "gemma3-bidirectional")
    assert not load_model(folder).spec.is_causal
    with pytest.raises(ConfigError, match=f"^{name}={value!r}: the model computes whole texts, .*; leave it out"):
        LLM(str(folder), executor="numpy", **{name: value})
    served = ServedModel(
        model=str(folder), names=("x",), options={name: value, "max_num_seqs": 3}, common=frozenset({name})
    )
    assert _fitted(served)[1] == {"max_num_seqs": 3}


@pytest.mark.skipif("torch" not in FLOATS, reason="needs PyTorch")
def test_an_executor_whose_tokens_see_no_later_ones_refuses_such_a_decoder(tmp_path):
    reason = "executor='torch': the model's tokens see later ones, which this executor does not compute; use 'native'"
    with pytest.raises(ConfigError, match=reason):
        LLM(str(make_pooling(tmp_path, "gemma3-bidirectional")), executor="torch")


def test_every_encoder_family_is_recorded():
    recorded = {tiny["config"]["model_type"] for tiny in POOLING.values()}
    assert set(ENCODER_FAMILIES) - {"xlm-roberta"} <= recorded  # RoBERTa with another vocabulary


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "executor"), [(name, one) for name in VECTORS for one in FLOATS if one != "torch" or not sees_later(name)]
)
def test_vectors_equal_those_of_transformers(tmp_path, name, executor):
    """In one batch of texts of different lengths, a decoder's in chunks too."""
    texts = POOLING[name]["texts"]
    with load(make_pooling(tmp_path, name), executor) as llm:
        for pooling in ("cls", "last", "mean"):
            params = PoolingParams(pooling=pooling, normalize=False)
            vectors = llm.embed([text["token_ids"] for text in texts], params)
            for vector, text in zip(vectors, texts, strict=True):
                np.testing.assert_allclose(vector, text[pooling], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("executor", [one for one in FLOATS if one != "torch"])
def test_vectors_of_a_gguf_file_of_eurobert_equal_those_of_transformers(tmp_path, executor):
    tiny = POOLING["eurobert"]
    tensors = {f"model.{name}": tensor for name, tensor in random_tensors(tiny["shapes"]).items()}
    more = {"eurobert.attention.causal": ("bool", False), "eurobert.pooling_type": ("u32", 1)}
    with load(write(tmp_path / "model.gguf", tiny["config"], tensors, more), executor) as llm:
        vectors = llm.embed([text["token_ids"] for text in tiny["texts"]], PoolingParams(normalize=False))
    for vector, text in zip(vectors, tiny["texts"], strict=True):
        np.testing.assert_allclose(vector, text["mean"], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("executor", [one for one in FLOATS if one != "torch"])
def test_embedding_gemma2_in_a_model_of_images_and_texts_gives_the_vectors_of_its_text_model(tmp_path, executor):
    """The vectors of tokens are projected, too."""
    tiny = POOLING["embedding-gemma2"]
    tensors = {f"language_model.{name}": tensor for name, tensor in random_tensors(tiny["shapes"]).items()}
    others = ("embed_vision.embedding_projection", "vision_tower.patch_embedder.input_proj", "audio_tower.conv.weight")
    tensors |= {f"{name}.weight": np.zeros((32, 8), np.float32) for name in others}
    folder = write_model(tmp_path / "model", {**tiny["config"]}, tensors)
    whole = {"model_type": "embedding_gemma2", "text_config": tiny["config"], "vision_config": {}, "audio_config": None}
    (folder / "config.json").write_text(json.dumps(whole | {"architectures": ["EmbeddingGemma2Model"]}))
    assert "only the text model is run" in load_model(folder).no_images
    with load(folder, executor) as llm:
        assert llm.model.pooling.hidden_size == 20
        prompts = [text["token_ids"] for text in tiny["texts"]]
        vectors = llm.embed(prompts, PoolingParams(normalize=False))
        tokens = llm.encode(prompts, PoolingParams(task="token_embed", pooling="all", normalize=False))
    for vector, rows, text in zip(vectors, tokens, tiny["texts"], strict=True):
        np.testing.assert_allclose(vector, text["mean"], rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(rows.outputs.data[-1], text["last"], rtol=1e-5, atol=2e-5)


def test_an_electra_with_narrower_embeddings_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: embedding_size = 16 is not hidden_size"):
        load_model(make_pooling(tmp_path, "electra", embedding_size=16))


def embedding_gemma(tmp_path, missing=(), **more):
    """A GGUF file with two layers after the pooling, these layers, and the model's record."""
    tiny, random = POOLING["embedding-gemma-bidirectional"], np.random.default_rng(3)
    tensors = {f"model.{name}": tensor for name, tensor in random_tensors(tiny["shapes"]).items()}
    dense = [random.standard_normal(shape).astype(np.float32) / 6 for shape in ((40, 32), (20, 40))]
    sizes = {"dense_2_feat_in": 32, "dense_2_feat_out": 40, "dense_3_feat_in": 40, "dense_3_feat_out": 20, **more}
    metadata = {f"gemma-embedding.{key}": ("u32", size) for key, size in {"pooling_type": 1, **sizes}.items()}
    extra = {f"dense_{i + 2}.weight": matrix for i, matrix in enumerate(dense) if f"dense_{i + 2}" not in missing}
    return write(tmp_path / "model.gguf", tiny["config"], tensors, metadata, extra), dense, tiny


@pytest.mark.parametrize("executor", [one for one in FLOATS if one != "torch"])
def test_vectors_of_a_gguf_file_of_embedding_gemma_equal_those_of_transformers(tmp_path, executor):
    path, dense, tiny = embedding_gemma(tmp_path)
    with load(path, executor) as llm:
        assert llm.model.pooling.hidden_size == 20
        vectors = llm.embed([text["token_ids"] for text in tiny["texts"]], PoolingParams(normalize=False))
    for vector, text in zip(vectors, tiny["texts"], strict=True):
        np.testing.assert_allclose(vector, np.array(text["mean"]) @ dense[0].T @ dense[1].T, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("key", "size"), [("dense_2_feat_in", 31), ("dense_2_feat_out", 41), ("dense_3_feat_out", 32)])
def test_sizes_of_layers_after_the_pooling_that_a_gguf_file_contradicts_are_refused(tmp_path, key, size):
    path, _, _ = embedding_gemma(tmp_path, **{key: size})
    with pytest.raises(ModelError, match=rf"{key.split('_feat')[0]}\.weight has shape .* {key} = {size} after"):
        load_model(path)


@pytest.mark.parametrize("missing", [("dense_2", "dense_3"), ("dense_2",), ("dense_3",)])
def test_layers_after_the_pooling_whose_sizes_a_gguf_file_has_are_not_left_out(tmp_path, missing):
    path, _, _ = embedding_gemma(tmp_path, missing=missing)
    with pytest.raises(ModelError, match=rf"{missing[0]}\.weight is missing, whose sizes the metadata have"):
        load_model(path)


@pytest.mark.parametrize(
    "classes", [{"AutoModel": 5}, {"AutoModel": None}, {"AutoModel": ["modeling_qwen.Qwen2Model"]},
                {"AutoModel": "modeling_qwen.Qwen2Model.x"}, {"AutoModel": "x"}]
)  # fmt: skip
def test_a_class_of_auto_map_that_transformers_does_not_read_is_refused(tmp_path, classes):
    with pytest.raises(ModelError, match=r"AutoModel of auto_map is .*, not a text such as"):
        load_model(make_pooling(tmp_path, "qwen2-bidirectional", absent=["is_causal"], auto_map=classes))


def test_tokens_of_gte_qwen2_see_later_ones_although_its_configuration_does_not_say_so(tmp_path):
    """The configuration names the code of the model, which computes attention to later tokens."""
    for repository, key, name, is_causal in (
        ("", "AutoModel", "Qwen2Model", False),
        ("Alibaba-NLP/gte-Qwen2-1.5B-instruct--", "AutoModel", "Qwen2Model", False),
        ("", "AutoModelForCausalLM", "Qwen2Model", True),
        ("", "AutoModel", "Other", True),
    ):
        code = {key: f"{repository}modeling_qwen.{name}"}
        spec = load_model(make_pooling(tmp_path, "qwen2-bidirectional", absent=["is_causal"], auto_map=code)).spec
        assert spec.is_causal == is_causal
        said = make_pooling(tmp_path, "qwen2-bidirectional", is_causal=True, auto_map=code)
        assert load_model(said).spec.is_causal


@pytest.mark.parametrize(
    ("name", "executor"),
    [(name, one) for name in CLASSIFIERS for one in FLOATS if one != "torch" or not sees_later(name)],
)
def test_heads_equal_those_of_transformers(tmp_path, name, executor):
    texts = POOLING[name]["texts"]
    with load(make_pooling(tmp_path, name), executor) as llm:
        prompts = [text["token_ids"] for text in texts]
        for reward, classified, text in zip(llm.reward(prompts), llm.classify(prompts), texts, strict=True):
            want = np.array(text["logits"])
            np.testing.assert_allclose(reward.outputs.data, want, atol=2e-5)
            probs = 1 / (1 + np.exp(-want)) if len(want) == 1 else softmax(want)
            np.testing.assert_allclose(classified.outputs.probs, probs, atol=2e-5)
        if "pair_logits" in texts[0]:
            pairs = PoolingParams(task="reward", first_text_len=FIRST_TEXT_LEN)
            for output, text in zip(llm.encode(prompts, pairs), texts, strict=True):
                np.testing.assert_allclose(output.outputs.data, text["pair_logits"], atol=2e-5)


def test_the_prefix_of_tensor_names_does_not_matter(tmp_path):
    """Encoders saved alone or within a classifier, decoders saved without their logits."""
    assert (
        load_model(make_pooling(tmp_path, "bert")).weights.keys()
        <= load_model(make_pooling(tmp_path, "bert-classifier")).weights.keys()
    )
    assert "embed_tokens.weight" in POOLING["qwen3"]["shapes"]


def test_a_classifier_of_eurobert_pools_as_the_key_of_its_own_code_says(tmp_path):
    for pooling in ("bos", "mean", "late"):
        folder = make_pooling(tmp_path, f"eurobert-classifier-{pooling}")
        own = make_pooling(
            tmp_path / "own", f"eurobert-classifier-{pooling}", absent=["classifier_pooling"], clf_pooling=pooling
        )
        assert load_model(own).pooling == load_model(folder).pooling
        assert load_model(own).unread_keys == ()


@pytest.mark.parametrize(
    ("problem", "activation"),
    [
        ("regression", "identity"),
        ("multi_label_classification", "sigmoid"),
        ("single_label_classification", "softmax"),
        (None, "softmax"),
    ],
)
def test_the_activation_of_several_labels_is_that_of_their_problem(tmp_path, problem, activation):
    assert load_model(make_pooling(tmp_path, "mpnet-classifier", problem_type=problem)).pooling.activation == activation


@pytest.mark.parametrize("executor", FLOATS)
def test_a_text_has_the_same_vector_alone_and_in_a_crowd(tmp_path, executor):
    folder = make_pooling(tmp_path, "modernbert")
    random = np.random.default_rng(0)
    texts = [random.integers(3, 48, int(n)).tolist() for n in random.integers(1, 25, 40)]
    with load(folder, executor) as llm:
        together = llm.embed(texts)
        for text, vector in zip(texts[:12], together, strict=False):
            [alone] = llm.embed([text])
            if executor == "native":
                np.testing.assert_array_equal(alone, vector)
            else:
                np.testing.assert_allclose(alone, vector, atol=1e-6)


@pytest.mark.skipif(not available(), reason="the native module is not built")
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_instruction_sets_of_the_native_encoder(tmp_path, threads):
    from foreword.executors.native_encoder import NativeEncoderExecutor
    from foreword.native import native

    model = load_model(make_pooling(tmp_path, "bert"))
    tokens, wants = [], []
    for text in POOLING["bert"]["texts"]:
        tokens += text["token_ids"]
        wants.append(text["mean"])
    lengths = [len(text["token_ids"]) for text in POOLING["bert"]["texts"]]
    for isa in native.isa_levels():
        executor = NativeEncoderExecutor(
            model.spec, model.weights, model.pooling, num_threads=threads, isa=isa, weight_format="fp32"
        )
        hidden = executor.core.encode(
            num_tokens=len(tokens),
            num_reqs=2,
            input_ids=np.array(tokens, np.int32),
            positions=np.concatenate([np.arange(n) for n in lengths]),
            query_start_loc=np.cumsum([0, *lengths], dtype=np.int32),
            token_types=None,
        )
        for rows, want in zip(np.split(hidden, np.cumsum(lengths)[:-1]), wants, strict=True):
            np.testing.assert_allclose(rows.mean(0), want, atol=2e-5)


@pytest.mark.skipif(not available(), reason="the native module is not built")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_ids", [3, 48], r"input_ids\[1\] = 48 is outside \[0, 48\)"),
        ("positions", [0, 2], r"positions\[1\] = 2 is outside \[1, 2\)"),
        ("query_start_loc", [0, 3], r"query_start_loc\[1\] = 3"),
        ("query_start_loc", [0, 1], r"query_start_loc\[1\] = 1 is outside \[2, 3\)"),
        ("token_types", [0, 2], r"token_types\[1\] = 2 is outside \[0, 2\)"),
    ],
)
def test_the_native_encoder_refuses_tensors_out_of_range(tmp_path, name, value, message):
    from foreword.executors.native_encoder import NativeEncoderExecutor

    model = load_model(make_pooling(tmp_path, "bert"))
    core = NativeEncoderExecutor(model.spec, model.weights, model.pooling).core
    values = {"input_ids": [3, 4], "positions": [0, 1], "query_start_loc": [0, 2], "token_types": [0, 1]}
    values[name] = value
    types = {"input_ids": np.int32, "positions": np.int64, "query_start_loc": np.int32, "token_types": np.int32}
    arrays = {key: np.array(given, types[key]) for key, given in values.items()}
    with pytest.raises(ValueError, match=message):
        core.encode(num_tokens=2, num_reqs=1, **arrays)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"hidden_act": "mish"}, "hidden_act = 'mish' is not supported"),
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type = 'relative_key' is not supported",
        ),
        ("bert", {"is_decoder": True}, "is_decoder = True is not supported"),
        ("bert", {"num_attention_heads": 5}, "hidden_size 32 is not a multiple of 5 heads"),
        ("bert", {"intermediate_size": 41}, r"has shape \(40, 32\), expected \(41, 32\)"),
        ("modernbert", {"mlp_bias": True}, "mlp_bias = True is not supported"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types .* is not 4 of"),
        ("modernbert-classifier", {"classifier_pooling": "max"}, "classifier_pooling = 'max' is not supported"),
        ("bert-classifier", {"id2label": {"0": "a", "2": "b"}}, "id2label is .*, not labels numbered from 0"),
        ("bert-classifier", {"problem_type": "ranking"}, "problem_type = 'ranking' is not supported"),
        ("bert-classifier", {"problem_type": ["regression"]}, r"problem_type is \['regression'\], not of type str"),
        ("bert-classifier", {"sbert_ce_default_activation_function": "x.Elu"}, "activation 'x.Elu' is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused(tmp_path, name, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(make_pooling(tmp_path, name, **changes))
