"""The special parts of Gemma 3n: streams, gates that begin above their mean, and inputs of layers."""

import json
from statistics import NormalDist

import numpy as np
import pytest

from foreword.errors import ConfigError, ModelError
from foreword.models.loader import load_model
from foreword.models.lora import read_lora
from models.lora_files import every_factor, merged, random_factors, write_peft
from models.recorded import TINY, assert_logits, make
from models.running import EXECUTORS, all_logits, in_chunks, whole
from models.tiny import random_tensors, write_model


def test_the_text_model_of_a_model_of_images_and_sounds_is_run(tmp_path):
    tiny = TINY["gemma3n"]
    tensors = random_tensors(tiny["shapes"])
    tensors = {key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()}
    tensors |= {f"model.{name}.weight": np.ones((2, 2), "<f4") for name in ("vision_tower.a", "embed_audio.b")}
    outer = {"model_type": "gemma3n", "text_config": tiny["config"], "vocab_size": tiny["config"]["vocab_size"]}
    assert_logits(load_model(write_model(tmp_path / "model", outer, tensors)), "gemma3n")


def test_a_share_of_each_gate_is_left_out_by_the_normal_distribution(tmp_path):
    folder = make(tmp_path, "gemma3n")
    assert [layer.gate_cutoff for layer in load_model(folder).spec.layers] == [
        NormalDist().inv_cdf(0.8), NormalDist().inv_cdf(0.3), None, None, NormalDist().inv_cdf(0.9), None
    ]  # fmt: skip
    config = {**TINY["gemma3n"]["config"], "activation_sparsity_pattern": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert {layer.gate_cutoff for layer in load_model(folder).spec.layers} == {None}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_ids_past_the_table_of_inputs_have_those_of_id_0(tmp_path, executor):
    model = load_model(make(tmp_path, "gemma3n-plain"))
    tensors = random_tensors(TINY["gemma3n-plain"]["shapes"])
    tensors["model.embed_tokens.weight"][0] = tensors["model.embed_tokens.weight"][45]
    same = load_model(write_model(tmp_path / "same", TINY["gemma3n-plain"]["config"], tensors))
    [want] = all_logits(same, [[7, 0, 9]], whole([[7, 0, 9]]), executor)
    [got] = all_logits(model, [[7, 45, 9]], whole([[7, 45, 9]]), executor)
    np.testing.assert_allclose(got, want, atol=1e-4)


def with_streams(count):
    """The shapes of a tiny model with so many streams."""
    shapes, hidden = dict(TINY["gemma3n"]["shapes"]), TINY["gemma3n"]["config"]["hidden_size"]
    sizes = {
        "modality_router": (count, hidden),
        "prediction_coefs": (count**2, count),
        "correction_coefs": (count,) * 2,
    }
    shapes = {
        name: sizes.get(name.split(".")[-2], shape) for name, shape in shapes.items() if "projections." not in name
    }
    for name in ("altup_projections", "altup_unembed_projections"):
        shapes |= {f"model.{name}.{k}.weight": (hidden, hidden) for k in range(count - 1)}
    return shapes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("count", [2, 5, 8])
def test_adapters_of_one_batch_change_any_number_of_streams(tmp_path, count, executor):
    tiny, shapes = TINY["gemma3n"], with_streams(count)
    config, tensors = {**tiny["config"], "altup_num_inputs": count}, random_tensors(shapes)
    model = load_model(write_model(tmp_path / "model", config, tensors))
    every = [{}, *(random_factors(shapes, rank, rank) for rank in (3, 20)), {}]
    loras, texts, want = [], [tiny["token_ids"][i : i + 11] for i in range(4)], []
    for text, factors in zip(texts, every, strict=True):
        rank = len(next(iter(factors.values()))[0]) if factors else 1
        folder = write_peft(tmp_path / str(rank), factors, r=rank, lora_alpha=rank / 2, target_modules="all-linear")
        loras.append(read_lora(folder, model.spec, model.family) if factors else None)
        changed = load_model(write_model(tmp_path / "merged", config, merged(tensors, factors, 0.5)))
        want += all_logits(changed, [text], whole([text]))
    got = all_logits(model, texts, in_chunks(texts, [3, 1, 5]), executor, block_size=4, loras=loras)
    for own, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-3)


STREAMS = (
    "altup_projections", "altup_unembed_projections", "altup.modality_router", "altup.prediction_coefs",
    "altup.correction_coefs", "laurel.linear_left", "laurel.linear_right",
)  # fmt: skip


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("part", STREAMS)
def test_an_adapter_changes_each_matrix_of_the_streams_for_its_own_requests(tmp_path, part, executor):
    tiny, model = TINY["gemma3n"], load_model(make(tmp_path, "gemma3n"))
    factors = {name: both for name, both in every_factor(tiny["shapes"]).items() if part in name}
    adapter = read_lora(
        write_peft(tmp_path / "adapter", factors, target_modules=list(factors)), model.spec, model.family
    )
    tensors = merged(random_tensors(tiny["shapes"]), factors, 8 / 4)
    changed = load_model(write_model(tmp_path / "merged", tiny["config"], tensors))
    texts = [tiny["token_ids"][:9], tiny["token_ids"][3:14], tiny["token_ids"][:9]]
    got = all_logits(model, texts, whole(texts), executor, loras=[None, adapter, adapter])
    plain, [_, *want] = (all_logits(of, texts, whole(texts), executor) for of in (model, changed))
    assert np.abs(got[2] - plain[2]).max() > 0.01
    np.testing.assert_allclose(got[0], plain[0], atol=1e-5)
    for own, expected in zip(got[1:], want, strict=True):
        np.testing.assert_allclose(own, expected, atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx = 1 is not supported"),
        ({"altup_num_inputs": 1}, "altup_num_inputs = 1 is not supported"),
        ({"altup_num_inputs": 9}, "altup_num_inputs = 9 is not supported"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input = 0 is not supported"),
        ({"activation_sparsity_pattern": [0.5]}, r"activation_sparsity_pattern \[0.5\] is not 6 numbers"),
        ({"activation_sparsity_pattern": 1.0}, "is not 6 numbers from 0 to below 1"),
        ({"intermediate_size": [40]}, r"intermediate_size \[40\] is not 6 sizes"),
        ({"num_kv_shared_layers": 5}, "some of them have no layer of their kind before them"),
        ({"laurel_rank": 0}, "laurel_rank = 0 is not from 1"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(make(tmp_path, "gemma3n", **changes))


def test_gates_that_are_compared_with_their_mean_are_not_divided_among_processes(tmp_path):
    shards = pytest.importorskip("foreword.executors.torch.shard")
    with pytest.raises(ConfigError, match="compares the gates of an MLP with the mean of all"):
        shards.Shards(0, 2).spec(load_model(make(tmp_path, "gemma3n")).spec)
