"""Rotary positions with several components (M-RoPE), against logits recorded from transformers and the definition."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.loader import load_model
from models.recorded import make
from models.running import EXECUTORS, all_logits, in_chunks
from models.tiny import random_tensors, write_model

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "models" / "mrope.json").read_text())["models"]


def load(folder, name, **changes):
    recorded = RECORDED[name]
    return load_model(write_model(folder / name, {**recorded["config"], **changes}, random_tensors(recorded["shapes"])))


def image_inputs(recorded, hidden_size=48):
    """The recorded image as prompt inputs; one token more than it has, as `all_logits` adds one."""
    first, end = recorded["image"]
    length = len(recorded["token_ids"]) + 1
    embeds, is_token = np.zeros((length, hidden_size), np.float32), np.ones(length, np.bool_)
    embeds[first:end], is_token[first:end] = recorded["vectors"], False
    return {
        "prompt_embeds": embeds,
        "prompt_is_token_id": is_token,
        "mrope_positions": np.array(recorded["positions"]),
        "mrope_delta": recorded["delta"],
    }


@pytest.mark.parametrize("sizes", [[24], [5, 1], [7]], ids=str)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", RECORDED)
def test_logits_after_an_image_equal_those_of_transformers(tmp_path, name, executor, sizes):
    recorded, model = RECORDED[name], load(tmp_path, name)
    text, want = recorded["token_ids"], np.array(recorded["last_logits"])
    inputs = [image_inputs(recorded), {}]
    texts = [text, text[:10]]  # and a text beside it
    logits, _ = all_logits(model, texts, in_chunks(texts, sizes), executor, block_size=4, inputs=inputs)
    np.testing.assert_allclose(logits[-len(want) :], want, atol=1e-4)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", RECORDED)
def test_text_is_rotated_as_by_a_model_without_sections_bit_for_bit(tmp_path, name, executor):
    parameters = RECORDED[name]["config"]["rope_parameters"]
    plain = {key: value for key, value in parameters.items() if not key.startswith("mrope")}
    ours, theirs = load(tmp_path, name), load(tmp_path / "plain", name, rope_parameters=plain)
    assert (ours.spec.mrope_dims, theirs.spec.mrope_dims) == (3, 0)
    texts = [RECORDED[name]["token_ids"]]
    for own in ({}, {"mrope_positions": np.tile(np.arange(20), (3, 1))}):
        got, want = (
            all_logits(model, texts, in_chunks(texts, [7]), executor, block_size=4, inputs=[inputs])[0]
            for model, inputs in ((ours, own), (theirs, {}))
        )
        assert np.array_equal(got, want)


def axes_by_definition(sections, num_pairs, interleaved):
    """Each component writes its pairs over those of the first, as the models' own code does."""
    axes = [0] * num_pairs
    if not interleaved:
        at = 0
        for axis, size in enumerate(sections):
            axes[at : at + size] = [axis] * size
            at += size
        return tuple(axes)
    for axis in range(1, len(sections)):
        for pair in range(axis, min(num_pairs, sections[axis] * len(sections)), len(sections)):
            axes[pair] = axis
    return tuple(axes)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sections", [[8], [4, 4], [2, 3, 3], [4, 2, 2], [2, 2, 2, 2], [5, 1, 1, 1]], ids=str)
def test_any_number_of_sections(tmp_path, sections, interleaved):
    check_sections(tmp_path, sections, interleaved)


@pytest.mark.parametrize("sections", [[11, 11, 10], [1, 1, 1], [0, 1, 9]], ids=str)
def test_interleaved_sections_need_not_add_up_to_the_pairs(tmp_path, sections):
    check_sections(tmp_path, sections, interleaved=True)


def check_sections(tmp_path, sections, interleaved):
    rope = {"rope_type": "default", "rope_theta": 50.0, "mrope_section": sections, "mrope_interleaved": interleaved}
    spec = load(tmp_path, "sections", rope_parameters=rope).spec
    axes = axes_by_definition(sections, 8, interleaved)
    assert {layer.rope.axes for layer in spec.layers} == {axes}
    assert spec.mrope_dims == 1 + max(axes)


def test_sections_of_an_older_configuration(tmp_path):
    new = load(tmp_path, "sections").spec
    older = {"type": "mrope", "mrope_section": [2, 3, 3]}
    config = {"rope_parameters": None, "rope_theta": 50.0, "rope_scaling": older}
    assert load(tmp_path, "sections", **config).spec == new


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"mrope_section": [2, 3, 2]}, r"mrope_section \[2, 3, 2\] does not add up to 8 pairs"),
        ({"mrope_section": [9, -1]}, "mrope_section .* does not add up"),
        ({"mrope_section": [4.0, 4.0]}, "mrope_section .* does not add up"),
        ({"mrope_section": "4,4"}, "mrope_section is '4,4', not of type list"),
        ({"mrope_section": [4, 4], "mrope_interleaved": "yes"}, "mrope_interleaved is 'yes'"),
        ({"rope_type": "mrope"}, "has no mrope_section"),
    ],
)
def test_sections_that_do_not_fit_the_heads_are_refused(tmp_path, rope, message):
    with pytest.raises(ModelError, match=message):
        load(tmp_path, "sections", rope_parameters={"rope_theta": 50.0, "rope_type": "default", **rope})


@pytest.mark.parametrize("executor", EXECUTORS)
def test_positions_of_another_number_of_components_are_refused(tmp_path, executor):
    model, positions = load(tmp_path, "sections"), np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match=r"mrope_positions .* has 2 dimensions, the model 3"):
        all_logits(model, [[1, 2, 3]], [[(0, 3)]], executor, inputs=[{"mrope_positions": positions}])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_embeddings_of_another_width_are_refused(tmp_path, executor):
    embeds = np.zeros((4, 5), np.float32)
    with pytest.raises(ValueError, match=r"prompt_embeds .* the model's embeddings have 32 values"):
        all_logits(load_model(make(tmp_path, "llama3")), [[1, 2, 3]], [[(0, 3)]], executor,
                   inputs=[{"prompt_embeds": embeds}])  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["llama3", "gemma2", "gemma3", "llama-linear-tied"])
def test_rows_of_the_embedding_table_give_the_logits_of_their_tokens_bit_for_bit(tmp_path, name, executor):
    model = load_model(make(tmp_path, name))
    model = replace(model, spec=model.spec.for_length(24))
    rng = np.random.default_rng(2)
    texts = [rng.integers(3, 48, 24).tolist(), rng.integers(3, 48, 9).tolist()]
    table = model.weights["embed"].dequantize() * np.float32(model.spec.embedding_scale)
    is_token = rng.random(25) < 0.5
    mixed = np.where(is_token[:, None], np.nan, table[[*texts[0], 0]])
    inputs = [
        {"prompt_embeds": mixed, "prompt_is_token_id": is_token},
        {"prompt_embeds": table[[*texts[1], 0]].astype(np.float64)},
    ]
    want = all_logits(model, texts, in_chunks(texts, [5, 2]), executor, block_size=4)
    got = all_logits(model, texts, in_chunks(texts, [5, 2]), executor, block_size=4, inputs=inputs)
    assert all(map(np.array_equal, got, want))
