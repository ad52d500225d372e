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
from models.lora_files import merged, write_peft
from models.recorded import TINY, assert_logits
from models.running import EXECUTORS, all_logits, in_chunks, whole
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


def apart(tensors):
    """The tensors of the model with a block for each of its layers aside, and so a product of low rank for each."""
    own = {FIRST: ".0.", LAST: ".2.", "model.layers.2.": ".1."}

    def is_own(name):
        n = next((n for begin, n in own.items() if name.startswith(begin)), "")
        return "_adapter_list." not in name or f"_adapter_list{n}" in name

    return {name: value for name, value in (tensors | copies(tensors)).items() if is_own(name)}


PARTS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"), "feed_forward.gate_up_proj", "feed_forward.down_proj",
    *(f"{module}_adapter_list.2.{i}" for i in (0, 1)
      for module in ("self_attn.linear_q", "self_attn.linear_k", "self_attn.linear_v", "feed_forward.gate_up_proj")),
)  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("begin", [FIRST, LAST])
@pytest.mark.parametrize("part", PARTS)
def test_an_adapter_changes_a_block_in_one_layer_alone(tmp_path, part, begin, executor):
    """PEFT wraps a linear layer in each of the modules that have the same weights."""
    slot = part.replace("_list.2.", "_list.0.") if begin == FIRST else part
    assert_changed(tmp_path, {begin + slot: factors_of(TENSORS[f"{FIRST}{slot}.weight"].shape)}, executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_adapters_of_one_batch_change_a_block_in_layers_of_their_own(tmp_path, executor):
    shapes = {part: TENSORS[f"{FIRST}{part}.weight"].shape for part in PARTS[:6]}
    first = {FIRST + part: factors_of(shape, 5) for part, shape in shapes.items()}
    last = {LAST + part: factors_of(shape, 6) for part, shape in shapes.items()}
    beside = {f"model.layers.{i}.linear": factors_of((32, 32), i) for i in (1, 2, 4)}
    assert_changed(tmp_path, first, executor, last, first | last | beside, beside)


def factors_of(shape, seed=3):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((4, shape[1])) / np.sqrt(shape[1]), rng.standard_normal((shape[0], 4)) / 4
    return a.astype("<f4"), b.astype("<f4")


def adapted(folder, model, factors):
    return read_lora(write_peft(folder, factors, target_modules=list(factors)), model.spec, model.family)


def assert_changed(folder, factors, executor, *others):
    """Compare requests of adapters in one batch, and one of none, with merged weights of blocks that are apart."""
    model, config = loaded(folder, TENSORS), {**TINY["zamba2"]["config"], "num_mem_blocks": 3}
    every = [{}, factors, *others]
    texts = [TINY["zamba2"]["token_ids"][i : i + 9] for i, _ in enumerate(every)]
    loras = [adapted(folder / str(i), model, own) if own else None for i, own in enumerate(every)]
    got = all_logits(model, texts, in_chunks(texts, [5, 1]), executor, loras=loras, block_size=4)
    plain = all_logits(model, texts, whole(texts), executor)
    for i, own in enumerate(every):
        merged_model = load_model(write_model(folder / "merged", config, merged(apart(TENSORS), own, 8 / 4)))
        [want] = all_logits(merged_model, [texts[i]], whole([texts[i]]))
        np.testing.assert_allclose(got[i], want, atol=1e-3)
        assert not own or np.abs(got[i] - plain[i]).max() > 0.01


@pytest.mark.parametrize("executor", EXECUTORS)
def test_products_of_low_rank_that_a_layer_has_for_another_change_nothing(tmp_path, executor):
    model, text = loaded(tmp_path, TENSORS), TINY["zamba2"]["token_ids"]
    slots = {FIRST: 2, LAST: 0}
    parts = {part.replace("_list.2.", f"_list.{n}."): begin for begin, n in slots.items() for part in PARTS[6:]}
    idle = {begin + part: factors_of(TENSORS[f"{FIRST}{part}.weight"].shape) for part, begin in parts.items()}
    adapter = adapted(tmp_path / "adapter", model, idle)
    [plain], [got] = (all_logits(model, [text], whole([text]), executor, loras=[one]) for one in (None, adapter))
    np.testing.assert_array_equal(got, plain)
    module, (a, b) = idle.popitem()
    with pytest.raises(ModelError, match=rf"{re.escape(module)}: lora_B has shape \(7, 4\), expected"):
        adapted(tmp_path / "other", model, {module: (a, b[:7])})


def test_an_adapter_of_a_module_that_is_several_layers_is_refused(tmp_path):
    """PEFT 0.21 writes the factors of such a module under the name of the first layer."""
    model, module = loaded(tmp_path, TENSORS), "self_attn.q_proj"
    factors = {begin + module: factors_of((64, 64)) for begin in (FIRST, "model.layers.2.shared_transformer.")}
    folder = write_peft(tmp_path / "adapter", factors, target_modules=["q_proj"])
    with pytest.raises(ModelError, match=rf"target_modules name {re.escape(LAST + module)}, which"):
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
    assert first.down.weight is second.down.weight
    assert first.mixer.inputs.weight is second.mixer.inputs.weight
    assert first.output.weight is not second.output.weight
