"""Directories of sentence-transformers: each key of their files is followed or refused by name."""

import json

import numpy as np
import pytest

from foreword import LLM, PoolingParams
from foreword.errors import ModelError, RequestError
from foreword.models.loader import load_model
from foreword.models.tokenizer import Tokenizer
from models.pooling_models import POOLING, make_pooling
from models.tiny import random_tensors, write_safetensors

MODULES = [{"type": f"sentence_transformers.models.{kind}", "path": path}
           for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"))]  # fmt: skip


def with_modules(folder, modules, pooling):
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "want"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_the_pooling_of_sentence_transformers_is_read(tmp_path, pooling, want):
    folder = with_modules(make_pooling(tmp_path, "bert"), MODULES, pooling)
    assert load_model(folder).pooling.pooling == want
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 7}))
    assert load_model(folder).spec.max_model_len == 7


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (MODULES, {"pooling_mode_max_tokens": True}, "pooling max_tokens is not supported"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pooling mean_tokens, cls_token"),
        ([*MODULES, {"type": "a.Router", "path": "2"}], {"pooling_mode": "mean"}, "module 'Router' is not supported"),
        ([*MODULES, {"type": "a.Dense", "path": "2"}], {"pooling_mode": "mean"}, r"2/config\.json: cannot be read"),
        ([{"path": ""}], {}, "type = None: expected a module with texts type and path"),
        ({"type": "a.Pooling"}, {}, "not a list of modules"),
    ],
)
def test_modules_that_cannot_be_followed_are_refused(tmp_path, modules, pooling, message):
    with pytest.raises(ModelError, match=message):
        load_model(with_modules(make_pooling(tmp_path, "bert"), modules, pooling))


DENSE = [
    {"in_features": 32, "out_features": 20, "bias": True, "activation_function": "torch.nn.ReLU"},
    {"in_features": 20, "out_features": 12, "bias": False, "activation_function": "torch.nn.Identity"},
]


def with_dense(folder, **changes):
    """The directory with two layers after the pooling, the second with changes, and the tensors of both."""
    modules = [*MODULES, *({"type": "sentence_transformers.models.Dense", "path": f"{i}_Dense"} for i in (2, 3))]
    with_modules(folder, modules, {"pooling_mode": "mean"})
    layers = []
    for i, config in enumerate((DENSE[0], {**DENSE[1], **changes})):
        place = folder / f"{2 + i}_Dense"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        names = ("weight", "bias") if DENSE[i]["bias"] else ("weight",)
        shape = DENSE[i]["out_features"], DENSE[i]["in_features"]
        layers.append(random_tensors({f"linear.{name}": shape[: 2 - (name == "bias")] for name in names}, seed=i))
        write_safetensors(place / "model.safetensors", layers[-1])
    return folder, layers


@pytest.mark.parametrize("name", ["bert", "gemma3-bidirectional"])
def test_layers_after_the_pooling_change_embeddings_and_not_those_of_tokens(tmp_path, name):
    folder, (first, second) = with_dense(make_pooling(tmp_path, name))
    with LLM(folder, executor="numpy") as llm:
        text = POOLING[name]["texts"][0]
        [vector] = llm.embed([text["token_ids"]])
        hidden = np.maximum(first["linear.weight"] @ np.array(text["mean"]) + first["linear.bias"], 0)
        expected = second["linear.weight"] @ hidden
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=2e-5)
        [shorter] = llm.embed([text["token_ids"]], PoolingParams(dimensions=5, normalize=False))
        np.testing.assert_allclose(shorter, expected[:5], atol=2e-4)
        [output] = llm.encode([text["token_ids"]], PoolingParams(task="token_embed"))
        assert output.outputs.data.shape == (len(text["token_ids"]), 32)
        with pytest.raises(RequestError, match="dimensions = 13: the model has 12"):
            llm.embed([text["token_ids"]], PoolingParams(dimensions=13))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 32}, "in_features of 3_Dense is 32, not 20"),
        ({"activation_function": "torch.nn.Hardswish"}, "activation_function 'Hardswish' is not supported"),
        ({"bias": True}, r"dense\.1\.linear\.bias .* is missing"),
        ({"use_residual": True}, "use_residual = True is not supported"),
        ({"scale": 2}, "scale = 2 is not supported"),
    ],
)
def test_layers_after_the_pooling_that_are_not_computed_are_refused(tmp_path, changes, message):
    folder, _ = with_dense(make_pooling(tmp_path, "bert"), **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def with_files(folder, **files):
    """The directory with these JSON files, whose names are those of the arguments."""
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def plain(tmp_path, *, normalizes=True, **files):
    modules = [*MODULES, {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}]
    folder = with_modules(make_pooling(tmp_path, "bert"), modules if normalizes else MODULES, {"pooling_mode": "mean"})
    return with_files(folder, **files)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("sentence_bert_config", {"zebra": 1}, r"sentence_bert_config\.json: zebra = 1 is not supported"),
        ("sentence_bert_config", {"transformer_task": "fill-mask"}, "transformer_task = 'fill-mask' is not supported"),
        ("sentence_bert_config", {"do_lower_case": "yes"}, "do_lower_case is 'yes', not of type bool"),
        ("sentence_bert_config", {"max_seq_length": 0}, "max_seq_length = 0 is not from 1"),
        ("sentence_roberta_config", {"zebra": 1}, r"sentence_roberta_config\.json: zebra = 1 is not supported"),
        ("config_sentence_transformers", {"zebra": 1}, "zebra = 1 is not supported"),
        ("config_sentence_transformers", {"truncate_dim": 8}, "truncate_dim = 8 is not supported"),
        ("config_sentence_transformers", {"model_type": "SparseEncoder"}, "model_type = 'SparseEncoder' is not supp"),
        ("config_sentence_transformers", {"prompts": ["a"]}, "prompts is .*, not texts by name"),
        (
            "config_sentence_transformers",
            {"prompts": {"query": "a"}, "default_prompt_name": "b"},
            "default_prompt_name = 'b' is not one of prompts",
        ),
        (
            "config_sentence_transformers",
            {"prompts": {"query": "a"}, "default_prompt_name": ["query"]},
            "default_prompt_name = \\['query'\\] is not one of prompts",
        ),
    ],
)
def test_a_key_that_is_not_computed_is_refused_with_its_file(tmp_path, name, values, message):
    with pytest.raises(ModelError, match=message):
        load_model(plain(tmp_path, **{name: values}))


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"word_embedding_dimension": 8}, "word_embedding_dimension = 8, the model has hidden_size 32"),
        ({"embedding_dimension": 8}, "embedding_dimension = 8, the model has hidden_size 32"),
        ({"pooling_mode": ["mean", "cls"]}, "pooling mean, cls is not supported"),
        ({"pooling_mode": "weightedmean"}, "pooling weightedmean is not supported"),
        ({"pooling_mode": {"mean": True}}, "pooling {'mean': True} is not supported"),
        ({"pooling_mode_cls_token": 1}, "pooling_mode_cls_token"),
        ({"pooling_mode_mean_tokens": "false"}, "pooling_mode_mean_tokens"),
        ({"pooling_mode_zebra": True}, "pooling_mode_zebra = True is not supported"),
        ({"pooling_mode_cls_token": True, "zebra": 1}, "zebra = 1 is not supported"),
    ],
)
def test_a_pooling_that_is_not_computed_is_refused(tmp_path, pooling, message):
    with pytest.raises(ModelError, match=message):
        load_model(with_modules(make_pooling(tmp_path, "bert"), MODULES, pooling))


@pytest.mark.parametrize(
    ("pooling", "want"),
    [
        ({"pooling_mode": ["cls"], "embedding_dimension": 32}, "cls"),
        ({"pooling_mode_mean_tokens": False, "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken", "pooling_mode_cls_token": True}, "last"),  # the older form has no effect
        ({"include_prompt": False}, "mean"),  # there is no prompt
    ],
)
def test_the_forms_of_a_pooling(tmp_path, pooling, want):
    assert load_model(with_modules(make_pooling(tmp_path, "bert"), MODULES, pooling)).pooling.pooling == want


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (MODULES[::-1], "modules Pooling, Transformer are not supported"),
        ([*MODULES, MODULES[1]], "modules Transformer, Pooling, Pooling are not supported"),
        ([{"type": "a.Transformer", "path": "0_Transformer"}], "the model is in '0_Transformer', not beside it"),
        ([MODULES[0], {"type": "a.Pooling", "path": "../x"}], r"Pooling is in '\.\./x', not in a folder beside it"),
    ],
)
def test_modules_in_another_order_or_place_are_refused(tmp_path, modules, message):
    with pytest.raises(ModelError, match=message):
        load_model(with_modules(make_pooling(tmp_path, "bert"), modules, {}))


def test_a_normalization_of_tokens_is_refused(tmp_path):
    folder = plain(tmp_path)
    (folder / "2_Normalize").mkdir()
    with pytest.raises(ModelError, match="module_input_name = 'token_embeddings' is not supported"):
        load_model(with_files(folder, **{"2_Normalize/config": {"module_input_name": "token_embeddings"}}))


def test_prompts_that_the_pooling_leaves_out_are_refused(tmp_path):
    folder = with_modules(make_pooling(tmp_path, "bert"), MODULES, {"include_prompt": False})
    with pytest.raises(ModelError, match="include_prompt = False is not supported for a model with prompts"):
        load_model(with_files(folder, config_sentence_transformers={"prompts": {"query": "a"}}))


def test_the_prompt_of_a_classifier_is_refused(tmp_path):
    values = {"prompts": {"query": "a"}, "default_prompt_name": "query"}
    folder = with_files(make_pooling(tmp_path, "bert-cross-encoder"), config_sentence_transformers=values)
    with pytest.raises(ModelError, match="the prompt 'query' of a classifier is not supported"):
        load_model(folder)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_texts_are_as_long_as_the_limit(tmp_path, name):
    folder = with_modules(make_pooling(tmp_path, name), MODULES, {"pooling_mode": "mean"})
    longest = load_model(folder).spec.max_model_len
    for limit, want in ((10**30, longest), (9, 9), (longest + 1, longest)):
        with_files(folder, tokenizer_config={"model_max_length": limit})
        assert load_model(folder).spec.max_model_len == want
    with_files(folder, sentence_bert_config={"max_seq_length": 7})
    assert load_model(folder).spec.max_model_len == 7


def test_texts_are_lower_cased_if_the_directory_says_so(tmp_path):
    lower, upper = "\u0101", "\u0100"
    folder = plain(tmp_path)
    assert Tokenizer.from_directory(folder).backend.normalizer is None
    for is_lowered, want in ((False, upper), (True, lower)):
        with_files(folder, sentence_bert_config={"do_lower_case": is_lowered})
        tokenizer = load_model(folder).tokenizer
        normalizer = tokenizer.backend.normalizer
        assert (upper if normalizer is None else normalizer.normalize_str(upper)) == want


QUERY, DOCUMENT, TEXT = "\x05", "\x06\x07", "\x0e\x0f"  # tokens with the numbers of these characters
MODEL = {"prompts": {"query": QUERY, "document": DOCUMENT, "none": None}, "default_prompt_name": "query"}


def ids(text):
    return list(map(ord, text))


@pytest.fixture
def llm(tmp_path):
    with LLM(str(plain(tmp_path, config_sentence_transformers=MODEL)), executor="numpy") as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("name", "prefix"), [(None, QUERY), ("query", QUERY), ("document", DOCUMENT), ("none", ""), ("", "")]
)
def test_a_text_is_embedded_behind_the_models_prompt(llm, name, prefix):
    [output] = llm.encode([TEXT], PoolingParams(prompt_name=name))
    assert output.prompt_token_ids == ids(prefix + TEXT)
    [plain] = llm.embed([ids(prefix + TEXT)])  # token ids are taken as they are
    np.testing.assert_array_equal(output.outputs.data, plain)


def test_a_prompt_that_cannot_be_used_is_refused(llm):
    for prompt, params, message in (
        (TEXT, PoolingParams(prompt_name="other"), "the model has 'query', 'document', 'none'"),
        (ids(TEXT), PoolingParams(prompt_name="query"), "comes before a text, and the prompt is token ids"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.embed([prompt], params)


def test_scores_compare_a_query_with_documents_behind_their_prompts(llm):
    texts = [TEXT, "\x10", "\x0e\x11"]
    first, *others = llm.embed([ids(QUERY + TEXT), *(ids(DOCUMENT + text) for text in texts)])
    got = [output.outputs.score for output in llm.score(TEXT, texts)]
    np.testing.assert_allclose(got, [np.dot(first, other) for other in others], atol=1e-6)
    [same] = llm.score(TEXT, TEXT, PoolingParams(prompt_name="none"))
    assert same.outputs.score == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "normalizes", "refused"),
    [("dot", True, False), ("cosine", False, False), ("dot", False, True), ("euclidean", True, True)],
)
def test_a_score_is_the_comparison_that_the_model_names(tmp_path, name, normalizes, refused):
    folder = plain(tmp_path, normalizes=normalizes, config_sentence_transformers={"similarity_fn_name": name})
    with LLM(str(folder), executor="numpy") as llm:
        if refused:
            with pytest.raises(RequestError, match=f"the model compares embeddings by {name}"):
                llm.score(TEXT, TEXT)
        else:
            assert llm.score(TEXT, TEXT)[0].outputs.score == pytest.approx(1, abs=1e-6)
