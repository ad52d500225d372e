"""Adapters against models with merged weights, W + scale · B A, and against the logits that PEFT computes."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from foreword import LLM
from foreword.engine.model import model_of
from foreword.errors import ModelError
from foreword.executors.kinds import KINDS
from foreword.models.families.base import Rows
from foreword.models.loader import load_model
from foreword.models.lora import MAX_RANK, read_lora
from foreword.models.lora.adapter import Module
from foreword.models.lora.peft import read_peft
from models import gguf_writer
from models.gguf_models import ARCHITECTURES
from models.lora_cases import CASES, write_case
from models.lora_files import (
    as_parameters,
    every_factor,
    gguf_parts,
    linear_modules,
    merged,
    random_expert_factors,
    random_factors,
    write_peft,
)
from models.mlx_layouts import as_mlx_has
from models.pooling_models import POOLING, make_pooling
from models.recorded import TINY, make
from models.running import EXECUTORS, all_logits, in_chunks, whole
from models.test_gguf_models import WITH_TRANSFORMERS_LOGITS, as_gguf
from models.tiny import random_tensors, write_model

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "models" / "lora.json").read_text())
FAMILIES = sorted({tiny["config"]["model_type"]: name for name, tiny in TINY.items() if "biased" not in name}.values())
"""One tiny model of each family."""
SCALED = {"falcon_h1"}  # their GGUF files have the multipliers in the weights
IN_GGUF = [name for name in FAMILIES if TINY[name]["config"]["model_type"] in ARCHITECTURES.keys() - SCALED]


class Rig:
    """A tiny model, and its logits with weights merged."""

    def __init__(self, tmp_path, name):
        self.path, self.tiny = tmp_path, TINY[name]
        self.tensors = random_tensors(self.tiny["shapes"])
        self.model = load_model(make(tmp_path, name))
        self.text = self.tiny["token_ids"][:18]
        # The native executor differs by as much for merged weights: 3e-4 in Gemma 4 and in Jamba.
        self.tolerance = 1e-3

    def read(self, path):
        return read_lora(path, self.model.spec, self.model.family)

    def merged_logits(self, factors, scale):
        model = load_model(write_model(self.path / "merged", self.tiny["config"], merged(self.tensors, factors, scale)))
        [logits] = all_logits(model, [self.text], whole([self.text]))
        return logits

    def logits(self, adapter, executor="numpy", model=None):
        [logits] = all_logits(model or self.model, [self.text], whole([self.text]), executor, loras=[adapter])
        return logits


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path, "llama3")


def factors_in_gguf(shapes):
    """Random changes of the linear layers that adapters in GGUF files may change."""
    factors = every_factor(shapes)
    refused = re.compile(r"kv_b_proj$|\.altup_(unembed_)?projections\.")
    return {name: both for name, both in factors.items() if not refused.search(name)}


def assert_equal(got, want, atol=1e-4):
    np.testing.assert_allclose(got, want, atol=atol)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_of_each_family_gives_the_logits_of_merged_weights(tmp_path, name, executor):
    rig = Rig(tmp_path, name)
    factors = every_factor(rig.tiny["shapes"])
    folder = write_peft(tmp_path / "adapter", factors, target_modules="all-linear")
    want = rig.merged_logits(factors, 8 / 4)
    assert np.abs(rig.logits(None) - want).max() > 0.1
    assert_equal(rig.logits(rig.read(folder), executor), want, rig.tolerance)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_adapter_of_each_family_gives_the_logits_of_merged_weights(tmp_path, name, executor):
    rig = Rig(tmp_path, name)
    factors = factors_in_gguf(rig.tiny["shapes"])
    path = gguf_writer.write(tmp_path / "adapter.gguf", *gguf_parts(rig.tiny["config"], factors, alpha=6.0))
    assert_equal(rig.logits(rig.read(path), executor), rig.merged_logits(factors, 6 / 4), rig.tolerance)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_router_may_be_no_linear_layer_and_other_matrices_of_all_linear_may_not(tmp_path, executor):
    rig = Rig(tmp_path, "qwen2-moe")
    factors = random_factors(rig.tiny["shapes"])
    kept = {name: both for name, both in factors.items() if not name.endswith("mlp.gate")}
    assert 0 < len(kept) < len(factors)
    adapter = rig.read(write_peft(tmp_path / "adapter", kept, target_modules="all-linear"))
    assert_equal(rig.logits(adapter, executor), rig.merged_logits(kept, 2.0), rig.tolerance)
    del kept["model.layers.1.mlp.shared_expert_gate"]
    with pytest.raises(ModelError, match=r"name model\.layers\.1\.mlp\.shared_expert_gate, which"):
        rig.read(write_peft(tmp_path / "adapter", kept, target_modules="all-linear"))


def assert_equal_pairs(got, want):
    assert got.keys() == want.keys()
    for name, pair in got.items():
        assert pair.scale == want[name].scale
        for one, other in ((pair.a, want[name].a), (pair.b, want[name].b)):
            np.testing.assert_array_equal(one.dequantize(), other.dequantize())


EXPERTS_APART = [name for name in FAMILIES if any(".experts.0.up_proj" in key for key in TINY[name]["shapes"])]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", EXPERTS_APART)
def test_linear_layers_of_experts_and_parameters_of_all_are_the_same_changes(tmp_path, name):
    """PEFT turns the former into the latter: gate and up in one, each with ranks of its own."""
    rig = Rig(tmp_path, name)
    factors = random_factors(rig.tiny["shapes"])
    experts = next(layer.experts for layer in rig.model.spec.layers if layer.experts)
    alone = {"rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {r".*\.gate_up_proj": 16}}
    want = rig.read(write_peft(tmp_path / "apart", factors))
    parameters = as_parameters(factors, experts.num_experts, experts.identities)
    alone = {} if any(".experts.up_proj" in key for key in parameters) else alone
    got = rig.read(write_peft(tmp_path / "together", parameters, **alone))
    assert any(".experts." in key for key in want.pairs)
    assert_equal_pairs(got.pairs, want.pairs)


@pytest.mark.parametrize("name", ["gemma4-moe", "granite-moe", "llama4"])
def test_versions_of_peft_that_take_inputs_of_experts_for_outputs_are_told_by_shapes(tmp_path, name):
    rig = Rig(tmp_path, name)
    factors = random_expert_factors(rig.tiny["shapes"])
    one, other = (
        rig.read(write_peft(tmp_path / str(swapped), factors, swapped=swapped, target_modules=None)).pairs
        for swapped in (False, True)
    )
    assert_equal_pairs(one, other)


@pytest.mark.parametrize(
    ("swapped", "version", "is_swapped"),
    [
        *(("before 0.19", version, True) for version in (None, "0.17.1", "0.18.1.dev0")),
        *(("before 0.19", version, False) for version in ("0.19.0", "0.21.2", "1.0.0")),
        *(("from 0.19", "0.18.0", False), ("from 0.19", "0.21.2", True), ("never", "0.18.0", False)),
        ("never", "0.21.2", False),
    ],
)
def test_versions_of_peft_tell_inputs_of_square_experts_from_outputs(tmp_path, swapped, version, is_swapped):
    name, rng = "model.layers.0.mlp.experts.down_proj", np.random.default_rng(2)
    factors = {name: (rng.standard_normal((3, 2, 5)), rng.standard_normal((3, 5, 2)))}
    folder = write_peft(tmp_path, factors, swapped=is_swapped, r=2, lora_alpha=2, target_modules=[],
                        peft_version=version)  # fmt: skip
    module = Module(5, 5, (("layers.0.experts.{e}.down", Rows("", 0, 5)),), 3, 0, swapped)
    pairs = read_peft(folder, {}, parameters={"model.layers.0": {"down_proj": module}}).pairs
    for e, (a, b) in enumerate(zip(*factors[name], strict=True)):
        np.testing.assert_array_equal(pairs[f"layers.0.experts.{e}.down"].a.dequantize(), a.astype("f4"))
        np.testing.assert_array_equal(pairs[f"layers.0.experts.{e}.down"].b.dequantize(), b.astype("f4"))


def test_shapes_of_other_matrices_tell_inputs_of_square_experts_from_outputs(tmp_path):
    rng, layer = np.random.default_rng(2), "model.layers.0"
    factors = {
        f"{layer}.mlp.experts.gate_up_proj": (rng.standard_normal((3, 2, 5)), rng.standard_normal((3, 10, 2))),
        f"{layer}.mlp.experts.down_proj": (rng.standard_normal((3, 2, 5)), rng.standard_normal((3, 5, 2))),
    }
    parts = {"gate_up_proj": (10, (("e.{e}.gate", Rows("", 0, 5)), ("e.{e}.up", Rows("", 5, 10)))),
             "down_proj": (5, (("e.{e}.down", Rows("", 0, 5)),))}  # fmt: skip
    modules = {name: Module(outputs, 5, own, 3, 0, "never") for name, (outputs, own) in parts.items()}
    for swapped in (False, True):
        folder = write_peft(tmp_path, factors, swapped=swapped, r=2, lora_alpha=2, target_modules=[])
        pairs = read_peft(folder, {}, parameters={layer: modules}).pairs
        for e, (a, b) in enumerate(zip(*factors[f"{layer}.mlp.experts.down_proj"], strict=True)):
            np.testing.assert_array_equal(pairs[f"e.{e}.down"].a.dequantize(), a.astype("f4"))
            np.testing.assert_array_equal(pairs[f"e.{e}.down"].b.dequantize(), b.astype("f4"))


def test_experts_that_training_did_not_change_need_one_rank(tmp_path):
    rig = Rig(tmp_path, "qwen3-moe")
    ends = ("gate_proj", "up_proj", "down_proj")
    factors = random_factors(rig.tiny["shapes"], MAX_RANK, ends=ends)
    factors = {name: both for name, both in factors.items() if ".experts." in name}
    for name, (_, b) in factors.items():
        if ".experts.4." in name:
            b[:] = 0
    double = {"rank_pattern": {"gate_up_proj": 2 * MAX_RANK}, "alpha_pattern": {"gate_up_proj": 2 * MAX_RANK}}
    folder = write_peft(tmp_path / "adapter", as_parameters(factors, 6), r=MAX_RANK, lora_alpha=MAX_RANK, **double)
    adapter = rig.read(folder)
    assert adapter.pairs["layers.0.experts.4.gate"].a.shape[0] == 1
    assert adapter.pairs["layers.0.experts.3.gate"].a.shape[0] == MAX_RANK
    assert_equal(rig.logits(adapter), rig.merged_logits(factors, 1.0), rig.tolerance)


OF_CLASSES = {"self_attn.gate_proj": "self_attn.g_proj", "block_sparse_moe.gate": "mlp.router"}
"""Names in checkpoints of LFM3 and of Phi-3.5 with experts → those of the classes of transformers."""


@pytest.mark.parametrize("name", ["qwen3_5", "lfm3", "phimoe"])
def test_modules_may_have_the_names_of_a_model_with_encoders_and_those_of_its_classes(tmp_path, name):
    rig = Rig(tmp_path, name)
    factors = random_factors(rig.tiny["shapes"])
    named = {module.replace("model.", "model.language_model.", 1): both for module, both in factors.items()}
    for own, other in OF_CLASSES.items():
        named = {module.replace(own, other): both for module, both in named.items()}
    targets = sorted({module.rpartition(".")[2] for module in named})
    adapter = rig.read(write_peft(tmp_path / "adapter", named, target_modules=targets))
    assert_equal(rig.logits(adapter), rig.merged_logits(factors, 2.0), rig.tolerance)


@pytest.mark.parametrize("name", ["eurobert", "embedding-gemma2"])
@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("task", [None, "FEATURE_EXTRACTION"])
def test_an_adapter_of_a_model_without_its_head_changes_vectors_as_merged_weights_do(tmp_path, name, prefix, task):
    """Names of such a model lack that of the model in front, in the files of the model and in those of the adapter."""
    tiny = POOLING[name]
    tensors = random_tensors(tiny["shapes"])
    ends = "_proj.weight", "_gate.weight", "_projection.weight"
    changed = [module for module in tensors if module.endswith(ends) and "embedding_projection" not in module]
    factors = random_factors({module: tensors[module].shape for module in changed})
    assert len(factors) > 3 * 7 - 1
    adapter = write_peft(
        tmp_path / "adapter", {f"{prefix}{module}": both for module, both in factors.items()}, task_type=task
    )
    whole_model = write_model(tmp_path / "merged", tiny["config"], merged(tensors, factors, 2.0))
    text = tiny["texts"][0]["token_ids"]
    options = {"executor": "numpy", "max_model_len": 24, "num_blocks": 64, "block_size": 4}
    with LLM(str(whole_model), **options) as llm:
        [want] = llm.embed([text])
    with LLM(str(make_pooling(tmp_path, name)), loras={"a": str(adapter)}, **options) as llm:
        [got], [plain] = llm.embed([text], lora="a"), llm.embed([text])
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(plain - want).max() > 1e-2


def test_models_that_have_multipliers_in_their_weights_refuse_adapters(tmp_path):
    rig = Rig(tmp_path, "falcon-h1")
    factors = random_factors(rig.tiny["shapes"])
    folder = write_peft(tmp_path / "adapter", factors)
    tensors = as_mlx_has(random_tensors(rig.tiny["shapes"]), rig.tiny["config"])
    by_mlx = write_model(tmp_path / "mlx", rig.tiny["config"], tensors)
    for model in (load_model(as_gguf(tmp_path, "falcon-h1")), load_model(by_mlx)):
        with pytest.raises(ModelError, match=r"falcon_h1 have its multipliers.* Use the model's own checkpoint"):
            read_lora(folder, model.spec, model.family)
    path = gguf_writer.write(tmp_path / "adapter.gguf", *gguf_parts(rig.tiny["config"], factors))
    with pytest.raises(ModelError, match="GGUF adapters for 'falcon_h1' models are not supported"):
        rig.read(path)


def test_a_directory_of_falcon_h1_whose_multipliers_are_all_1_takes_adapters(tmp_path):
    config = TINY["falcon-h1"]["config"]
    ones = {name: 1.0 for name in config if name.endswith("_multiplier")}
    ones |= {name: [1.0] * len(config[name]) for name in ("mlp_multipliers", "ssm_multipliers")}
    model = load_model(make(tmp_path, "falcon-h1", **ones))
    assert (model.spec.gate_scale, model.spec.logit_scale) == (1, 1)
    folder = write_peft(tmp_path / "adapter", random_factors(TINY["falcon-h1"]["shapes"]))
    assert model_of(model, KINDS["numpy"], KINDS["numpy"].read_options({})).read_lora(folder).pairs


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [
        *("llama-yarn", "smollm3", "qwen3", "phi3", "qwen3_5", "lfm2", "granite-hybrid", "jamba"),
        *("nemotron-h-latent", "mamba2", "deepseek-v2", "gemma4", "gemma4-moe"),
    ],
)
def test_a_gguf_model_takes_adapters_of_both_kinds(tmp_path, name):
    rig = Rig(tmp_path, name)
    config, factors = rig.tiny["config"], factors_in_gguf(rig.tiny["shapes"])
    model = load_model(as_gguf(tmp_path, name, *WITH_TRANSFORMERS_LOGITS[name]))
    want = rig.merged_logits(factors, 2.0)
    for path in (
        write_peft(tmp_path / "adapter", factors),
        gguf_writer.write(tmp_path / "adapter.gguf", *gguf_parts(config, factors)),
    ):
        assert_equal(rig.logits(read_lora(path, model.spec, model.family), model=model), want, rig.tolerance)


def test_a_gguf_adapter_does_not_change_the_matrices_of_heads_of_latent_attention(tmp_path):
    rig = Rig(tmp_path, "deepseek-v2")
    factors = random_factors(rig.tiny["shapes"], ends=("kv_b_proj",))
    path = gguf_writer.write(tmp_path / "adapter.gguf", *gguf_parts(rig.tiny["config"] | {"old_file": True}, factors))
    with pytest.raises(ModelError, match=r"changes blk\.0\.attn_kv_b, which is not supported for this model"):
        rig.read(path)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "name",
    ["llama3", "qwen3_5", "qwen3-next", "lfm2", "granite-hybrid", "jamba", "mamba", "minicpm3", "qwen2-moe", "gemma4"],
)
def test_texts_with_other_adapters_and_without_share_steps(tmp_path, name, executor):
    """Each adapter has another rank, and changes other kinds of linear layers."""
    rig = Rig(tmp_path, name)
    shapes, adapters, want = rig.tiny["shapes"], [None], [rig.logits(None)]
    kinds = sorted({re.sub(r".*\.\d+\.", ".", module) for module in linear_modules(shapes)})
    for seed, (rank, ends) in enumerate([(1, kinds[:1]), (3, kinds[::2]), (MAX_RANK, kinds[1:2]), (17, kinds[::-3]),
                                         (8, kinds)]):  # fmt: skip
        factors = random_factors(shapes, rank, seed, tuple(ends))
        folder = write_peft(rig.path / str(seed), factors, r=rank, lora_alpha=rank, target_modules=list(factors))
        adapters.append(rig.read(folder))
        want.append(rig.merged_logits(factors, 1.0))
    order = [3, 0, 1, 5, 0, 2, 4, 1, 3]
    texts, loras = [rig.text] * len(order), [adapters[i] for i in order]
    for sizes in ([18], [5, 1], [1, 2, 7]):
        got = all_logits(rig.model, texts, in_chunks(texts, sizes), executor, block_size=4, loras=loras)
        for i, logits in zip(order, got, strict=True):
            assert_equal(logits, want[i], rig.tolerance)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_adapter_changes_the_head_of_its_own_tokens_whose_logits_are_wanted(tmp_path, executor):
    rig = Rig(tmp_path, "modernbert-decoder")
    loras, want = [None], [rig.logits(None)]
    for seed, rank in enumerate((4, 20)):
        factors = random_factors(rig.tiny["shapes"], rank, seed, ("lm_head.dense",))
        assert len(factors) == 1
        folder = write_peft(tmp_path / str(seed), factors, r=rank, target_modules=["dense"])
        loras.append(rig.read(folder))
        want.append(rig.merged_logits(factors, 8 / rank))
        assert np.abs(want[-1] - want[0]).max() > 0.1
    order = [1, 0, 2, 0, 1]
    texts, own = [rig.text] * len(order), [loras[i] for i in order]
    for plan in (whole(texts), in_chunks(texts, [5, 1, 3])):
        got = all_logits(rig.model, texts, plan, executor, block_size=4, first_position=7, loras=own)
        for i, logits in zip(order, got, strict=True):
            assert_equal(logits, want[i][7:])


def test_rank_and_alpha_patterns_and_rank_stabilised_scales(rig):
    rank = {"q_proj": 2, "layers.1.mlp.up_proj": 7}
    alpha = {r"layers\.[02]\..*_proj": 5, "down_proj": 3}

    def rank_of(name):
        return next((r for end, r in rank.items() if name.endswith(end)), 4)

    def alpha_of(name):
        return 5 if ".layers.0." in name or ".layers.2." in name else 3 if name.endswith("down_proj") else 8

    factors = random_factors(rig.tiny["shapes"], rank_of)
    for is_stable in (False, True):
        folder = write_peft(rig.path / "adapter", factors, rank_pattern=rank, alpha_pattern=alpha, use_rslora=is_stable)
        scale = {name: alpha_of(name) / (math.sqrt(rank_of(name)) if is_stable else rank_of(name)) for name in factors}
        assert_equal(rig.logits(rig.read(folder)), rig.merged_logits(factors, scale.get))


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({"target_modules": ["q_proj", "mlp.up_proj"]}, lambda name: name.endswith(("q_proj", "up_proj"))),
        ({"target_modules": r"model\.layers\.[13]\..*(k|v)_proj"},
         lambda name: name.split(".")[2] in "13" and name.endswith(("k_proj", "v_proj"))),
        ({"target_modules": "all-linear", "exclude_modules": ["o_proj"]}, lambda name: not name.endswith("o_proj")),
        ({"target_modules": ["down_proj"], "layers_to_transform": [0, 3]},
         lambda name: name.endswith("down_proj") and name.split(".")[2] in "03"),
        ({"target_modules": ["down_proj"], "layers_to_transform": 2, "layers_pattern": "layers"},
         lambda name: name.endswith("2.mlp.down_proj")),
    ],
)  # fmt: skip
def test_targets_are_chosen_by_name_by_pattern_and_by_layer(rig, config, chosen):
    every = random_factors(rig.tiny["shapes"])
    factors = {name: both for name, both in every.items() if chosen(name)}
    assert 0 < len(factors) < len(every)
    adapter = rig.read(write_peft(rig.path / "adapter", factors, **config))
    assert len(adapter.pairs) == len(factors)
    assert_equal(rig.logits(adapter), rig.merged_logits(factors, 2.0))


def test_every_linear_layer_of_a_dense_model_can_be_changed(rig):
    assert len(linear_modules(rig.tiny["shapes"])) == 7 * rig.model.spec.num_layers


@pytest.mark.one_in(13)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_peft(tmp_path, name, executor):
    case, want = CASES[name], np.array(RECORDED[name])
    rig = Rig(tmp_path, case["model"])
    text = rig.tiny["token_ids"]
    adapter = rig.read(write_case(tmp_path / "adapter", case))
    for sizes in ([len(text)], [5, 1]):
        [logits] = all_logits(rig.model, [text], in_chunks([text], sizes), executor, block_size=4, loras=[adapter])
        assert_equal(logits[-len(want) :], want, rig.tolerance)
    assert np.abs(want - rig.tiny["last_logits"]).max() > 0.1
