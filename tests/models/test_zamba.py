"""Weights that several layers have in common: copies in files, and one copy in memory."""

import re
from dataclasses import replace

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.executors.native import NativeExecutor
from foreword.models.loader import load_model
from foreword.models.lora import read_lora
from foreword.models.spec import AsideSpec
from kernels.kernel_reference import SPECS, random_weights
from models.lora_files import write_peft
from models.recorded import TINY, assert_logits
from models.running import EXECUTORS
from models.tiny import random_tensors, write_model

FIRST, LAST = "model.layers.1.shared_transformer.", "model.layers.4.shared_transformer."
TENSORS = random_tensors(TINY["zamba2"]["shapes"])


def copies(tensors):
    return {LAST + name.removeprefix(FIRST): value for name, value in tensors.items() if name.startswith(FIRST)}


def loaded(folder, tensors):
    return load_model(write_model(folder / "model", TINY["zamba2"]["config"], tensors))


def test_a_file_may_have_the_weights_of_a_block_at_any_of_its_layers(tmp_path):
    kept = {name: value for name, value in TENSORS.items() if not name.startswith(FIRST)}
    for folder, tensors in (("both", TENSORS), ("last", kept)):
        assert_logits(loaded(tmp_path / folder, tensors | copies(TENSORS)), "zamba2")


def test_copies_of_a_block_that_differ_are_refused(tmp_path):
    other = copies(TENSORS)
    other[LAST + "pre_ff_layernorm.weight"] = other[LAST + "pre_ff_layernorm.weight"] + 1
    message = rf"tensors {LAST}pre_ff_layernorm\.weight and {FIRST}pre_ff_layernorm\.weight are the same weight"
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path, TENSORS | other)


@pytest.mark.parametrize("module", [FIRST + "self_attn.q_proj", "model.layers.1.linear"])
def test_adapters_of_layers_aside_are_refused_by_name(tmp_path, module):
    model = loaded(tmp_path, TENSORS)
    rows, cols = TINY["zamba2"]["shapes"][f"{module}.weight"]
    own = {module: (np.ones((4, cols), np.float32), np.ones((rows, 4), np.float32))}
    folder = write_peft(tmp_path / "adapter", own, target_modules=[module.rpartition(".")[2]])
    with pytest.raises(ModelError, match=rf"changes {re.escape(module)}, which is not supported"):
        read_lora(folder, model.spec, model.family)


def test_the_weights_of_a_block_are_in_memory_once():
    spec = SPECS["aside_alike"]
    layers = [replace(layer, aside=layer.aside and AsideSpec(i // 2)) for i, layer in enumerate(spec.layers)]
    apart = replace(spec, layers=tuple(layers))
    sizes = []
    for one in (spec, apart):
        weights = random_weights(one)
        core = NativeExecutor(one, weights, num_blocks=4, block_size=16, num_threads=1, weight_format="bf16").core
        block = sum(2 * w.shape[0] * w.shape[1] for name, w in weights.items() if name in BLOCK)
        sizes.append(core.packed_bytes)
    assert sizes[1] - sizes[0] >= block > 0


BLOCK = {f"blocks.0.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def test_the_pytorch_executor_has_the_weights_of_a_block_once():
    pytest.importorskip("torch")
    spec = SPECS["aside_alike"]
    decoder = EXECUTORS["torch"](spec, random_weights(spec), num_blocks=4, block_size=16).decoder
    first, second = decoder.layers[0], decoder.layers[2]
    assert first.down is second.down
    assert first.mixer.inputs is second.mixer.inputs
    assert first.output is not second.output
