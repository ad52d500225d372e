"""Layers that run several times for a token: one copy of their weights, and files in other forms."""

from dataclasses import replace

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.executors.native import NativeExecutor
from foreword.models.loader import load_model
from foreword.models.lora import read_lora
from kernels.kernel_reference import SPECS, random_weights
from models.lora_files import random_factors, write_peft
from models.recorded import TINY, assert_logits, make
from models.running import EXECUTORS, all_logits, whole
from models.tiny import random_tensors, write_model

TENSORS = random_tensors(TINY["hrm-text"]["shapes"])
GQKV = ".attn.gqkv_proj.weight"


def in_modules(tensors):
    """The tensors by the names of the modules of transformers."""
    parts = {GQKV: [f".self_attn.{name}_proj.weight" for name in ("gate", "q", "k", "v")],
             ".attn.o_proj.weight": [".self_attn.o_proj.weight"],
             ".mlp.gate_up_proj.weight": [".mlp.gate_proj.weight", ".mlp.up_proj.weight"]}  # fmt: skip
    found = {}
    for name, value in tensors.items():
        end = next((end for end in parts if name.endswith(end)), name)
        names = [name.removesuffix(end) + part for part in parts.get(end, [name])]
        found |= dict(zip(names, np.split(value, len(names)) if len(names) > 1 else [value], strict=True))
    return found


@pytest.mark.parametrize("changed", [lambda tensors: tensors, in_modules])
def test_a_file_may_have_the_names_of_modules_and_the_older_configuration(tmp_path, changed):
    config = dict(TINY["hrm-text"]["config"])
    config["num_hidden_layers"] = config.pop("num_layers_per_stack")
    folder = write_model(tmp_path / "model", config, changed(TENSORS))
    model = load_model(folder)
    assert model.unread_keys == ()
    assert_logits(model, "hrm-text")


def test_layers_run_in_the_order_of_the_cycles(tmp_path):
    layers = load_model(make(tmp_path, "hrm-text")).spec.layers  # 2 · (2 + 1) runs have 2 layers each
    assert [layer.stream for layer in layers[::2]] == [0, 0, 1, 0, 0, 1]
    assert [layer.weights_of for layer in layers[::2]] == [None, 0, None, 0, 0, 4]
    assert all(layer.stream is None for layer in layers[1::2])


def test_a_scale_of_embeddings_that_is_absent_follows_from_the_weights_of_the_start(tmp_path):
    folder = make(tmp_path, "hrm-text", embedding_scale=None, initializer_range=0.25)
    assert load_model(folder).spec.embedding_scale == 4.0


def test_a_tensor_of_one_run_is_missing(tmp_path):
    name = f"model.H_module.layers.1{GQKV}"
    less = {key: value for key, value in TENSORS.items() if key != name}
    with pytest.raises(ModelError, match=rf"tensor {name} \(layers\.5\.q\) is missing"):
        load_model(write_model(tmp_path / "model", TINY["hrm-text"]["config"], less))


def test_the_weights_of_layers_that_run_again_are_in_memory_once():
    spec = SPECS["runs"]
    apart = replace(spec, layers=tuple(replace(layer, weights_of=None) for layer in spec.layers))
    sizes = []
    for one in (spec, apart):
        weights = random_weights(one)
        matrices = sum(2 * np.prod(w.shape) for name, w in weights.items() if "layers." in name and len(w.shape) > 1)
        core = NativeExecutor(one, weights, num_blocks=4, block_size=16, num_threads=1, weight_format="bf16").core
        sizes.append((core.packed_bytes, matrices))
    assert sizes[1][0] - sizes[0][0] >= sizes[1][1] - sizes[0][1] > 0


def test_the_pytorch_executor_has_layers_that_run_again_once():
    pytest.importorskip("torch")
    spec = SPECS["runs"]
    decoder = EXECUTORS["torch"](spec, random_weights(spec), num_blocks=4, block_size=16).decoder
    for again, first in ((2, 0), (3, 1), (7, 4)):
        layer, of = decoder.layers[again], decoder.layers[first]
        assert layer.mlp.down is of.mlp.down
        assert layer.mixer.inputs is of.mixer.inputs
        assert layer.mixer.index != of.mixer.index


def test_a_change_of_a_layer_applies_in_each_run_of_it(tmp_path):
    """With an adapter of one matrix, also as part of a batch with others."""
    model, text = load_model(make(tmp_path, "hrm-text")), TINY["hrm-text"]["token_ids"]
    name = "model.L_module.layers.1.mlp.down_proj"
    (a, b) = random_factors(TINY["hrm-text"]["shapes"])[name]
    adapter = read_lora(
        write_peft(tmp_path / "adapter", {name: (a, b)}, target_modules=[name]), model.spec, model.family
    )
    assert [*adapter.pairs] == ["layers.1.down"]
    changed = {**TENSORS, f"{name}.weight": (TENSORS[f"{name}.weight"] + 2 * b @ a).astype("<f4")}
    merged = load_model(write_model(tmp_path / "merged", TINY["hrm-text"]["config"], changed))
    texts = [text, text[:9]]
    [want, _], [_, plain] = (all_logits(of, texts, whole(texts)) for of in (merged, model))
    for executor in EXECUTORS:
        got = all_logits(model, texts, whole(texts), executor, loras=[adapter, None])
        np.testing.assert_allclose(got[0], want, atol=1e-3)
        np.testing.assert_allclose(got[1], plain, atol=1e-3)
