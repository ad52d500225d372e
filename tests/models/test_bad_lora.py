"""Adapters that cannot be used: each is an error that names the file, what is wrong and the fix."""

import json
import struct
import sys

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.loader import load_model
from foreword.models.lora import MAX_RANK, read_lora
from models import gguf_writer
from models.lora_files import as_parameters, gguf_parts, peft_tensors, random_expert_factors, random_factors, write_peft
from models.recorded import TINY, make
from models.tiny import write_safetensors

TINY_MODEL = TINY["llama3"]
Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def model(tmp_path):
    return load_model(make(tmp_path, "llama3"))


@pytest.fixture
def folder(tmp_path):
    return write_peft(tmp_path / "adapter", random_factors(TINY_MODEL["shapes"]))


def refused(model, path, *parts):
    with pytest.raises(ModelError) as caught:
        read_lora(path, model.spec, model.family)
    for part in (str(path), *parts):
        assert part in str(caught.value)


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"peft_type": None}, "peft_type is missing"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not supported, only 'CAUSAL_LM' and 'FEATURE_EXTRACTION'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"use_dora": True}, "use_dora = True"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices = [1]"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"a_later_invention": {"x": 1}}, "a_later_invention"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changes the base model"),
        ({"layers_to_transform": [1], "layers_pattern": "blocks"}, "layers_pattern"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform ['1']"),
        ({"target_modules": ["q_proj"]}, "do not name model.layers.0.mlp.down_proj, which adapter_model.safetensors"),
        ({"target_modules": "("}, "pattern '(' cannot be used"),
        ({"target_modules": "(.*)" * 8 + r"\1\2[^\w.]"}, "cannot be used"),
        ({"target_modules": 5}, "target_modules 5 is neither"),
        ({"target_modules": None}, "target_modules None is neither"),
        ({"r": 8}, "the rank 8, the weights have 4"),
        ({"r": 0}, "r = 0 is not from 1"),
        ({"r": "4"}, "r is '4', not of type int"),
        ({"rank_pattern": {"q_proj": 2}}, "the rank 2, the weights have 4"),
        ({"rank_pattern": {"q_proj": -2}}, "q_proj = -2.0 is not above zero"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern ['q_proj'] is not an object"),
        ({"alpha_pattern": {"q_proj": "high"}}, "q_proj is 'high'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    ],
)
def test_what_a_configuration_asks_for_and_is_not_supported_is_named(model, folder, changes, reason):
    change_config(folder, **changes)
    refused(model, folder, reason)


def test_a_layer_that_the_configuration_names_and_the_weights_lack_is_named(model, folder):
    factors = random_factors(TINY_MODEL["shapes"])
    del factors[Q0]
    write_safetensors(folder / "adapter_model.safetensors", peft_tensors(factors))
    refused(model, folder, f"target_modules name {Q0}, which adapter_model.safetensors does not have")


@pytest.mark.parametrize(
    ("letter", "change", "reason"),
    [
        ("A", lambda a: a[:, :-1], "lora_A has shape (4, 31), expected (4, 32)"),
        ("B", lambda b: b[:-1], "lora_B has shape (31, 4), expected (32, 4)"),
        ("B", lambda b: b[:, :-1], "lora_B has shape (32, 3), expected (32, 4)"),
        ("A", lambda a: a[0], "the rank 4, the weights have 32"),
        ("A", lambda a: a * np.nan, "lora_A has values that are not finite"),
        ("B", lambda b: b * np.inf, "lora_B has values that are not finite"),
    ],
)
def test_weights_of_other_shapes_or_without_numbers_are_named(model, folder, letter, change, reason):
    tensors = peft_tensors(random_factors(TINY_MODEL["shapes"]))
    name = f"base_model.model.{Q0}.lora_{letter}.weight"
    with np.errstate(invalid="ignore"):
        tensors[name] = change(tensors[name]).astype("<f4")
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    refused(model, folder, reason)


def test_a_rank_above_the_limit_is_refused(model, tmp_path):
    factors = random_factors(TINY_MODEL["shapes"], MAX_RANK + 1, ends=("q_proj",))
    refused(model, write_peft(tmp_path / "wide", factors, r=MAX_RANK + 1), "a rank above 256 is not supported")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("base_model.model.lm_head.lora_A.weight", "changes lm_head"),
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "changes model.layers.9.self_attn.q_proj"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embed_tokens.lora_embedding_A"),
        (f"base_model.model.{Q0}.lora_magnitude_vector.weight", "lora_magnitude_vector"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
    ],
)
def test_weights_that_are_no_change_of_a_linear_layer_are_named(model, folder, name, reason):
    more = {name: np.ones((4, 32), np.float32)}
    write_safetensors(folder / "adapter_model.safetensors", peft_tensors(random_factors(TINY_MODEL["shapes"])) | more)
    refused(model, folder, reason, "q_proj")


def test_one_factor_without_the_other_is_named(model, folder):
    tensors = peft_tensors(random_factors(TINY_MODEL["shapes"]))
    del tensors[f"base_model.model.{Q0}.lora_A.weight"]
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    refused(model, folder, f"{Q0} has lora_B alone")


def test_linear_layers_of_some_experts_alone_are_named(tmp_path):
    model = load_model(make(tmp_path, "mixtral"))
    factors = random_factors(TINY["mixtral"]["shapes"], ends=("w1", "q_proj"))
    missing = "model.layers.0.block_sparse_moe.experts.2.w1"
    del factors[missing]
    refused(model, write_peft(tmp_path / "adapter", factors), f"target_modules name {missing}, which")
    idle = "model.layers.0.block_sparse_moe.experts.7.w1"
    factors[idle] = factors["model.layers.0.block_sparse_moe.experts.1.w1"]
    refused(model, write_peft(tmp_path / "adapter", factors), f"changes {idle}")


EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def of_experts(tmp_path):
    """The tensors of an adapter of all experts, and how to write them."""
    shapes = TINY["qwen3-moe"]["shapes"]
    model = load_model(make(tmp_path, "qwen3-moe"))
    ends = ("q_proj", "gate_proj", "up_proj", "down_proj")
    factors = {name: both for name, both in random_factors(shapes, ends=ends).items() if ".1.mlp." not in name}
    factors = as_parameters(factors, 6)

    def write(tensors, **config):
        alone = {"rank_pattern": {"gate_up_proj": 8}, "alpha_pattern": {"gate_up_proj": 16}}
        folder = write_peft(tmp_path / "adapter", factors, **{**alone, **config})
        write_safetensors(folder / "adapter_model.safetensors", tensors)
        return folder

    return model, peft_tensors(factors), write


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rank_pattern": {}}, ".mlp.experts.gate_up_proj 6 times the rank 4, the weights have 48"),
        ({"r": 3}, "the rank 3, the weights have"),
        ({"target_parameters": "down_proj"}, "target_parameters 'down_proj' is not a list of names"),
        ({"target_parameters": [1]}, "target_parameters [1] is not a list of names"),
        ({"target_parameters": ["experts.w1"]}, "target_parameters ['experts.w1'] name no matrix of this model"),
        ({"target_parameters": ["experts.gate_up_proj"]}, ".mlp.experts.base_layer, which is not supported"),
        ({"target_parameters": []}, ".mlp.experts.base_layer, which is not supported"),
        ({"target_modules": []}, "target_modules do not name model.layers.0.self_attn.q_proj"),
        ({"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "v_proj.weight"]},
         "target_parameters name model.layers.0.self_attn.v_proj, which"),
    ],
)  # fmt: skip
def test_configurations_of_experts_that_the_weights_do_not_follow_are_named(of_experts, config, reason):
    model, tensors, write = of_experts
    refused(model, write(tensors, **config), reason)
    read_lora(write(tensors), model.spec, model.family)


@pytest.mark.parametrize(
    ("end", "change", "reason"),
    [
        ("experts.lora_A", lambda a: a[:, :-1], f"{EXPERTS}.down_proj: lora_A has shape (6, 4, 11), expected"),
        ("experts.lora_B", lambda b: b[:-1], f"{EXPERTS}.down_proj: lora_B has shape (6, 31, 4), expected"),
        ("experts.lora_A", lambda a: a[:-1], "the rank 4, the weights have 23"),
        ("experts.lora_B", lambda b: b[:, :-1], f"the shapes (24, 12) and (32, 23) for {EXPERTS}.down_proj"),
        ("experts.lora_B", lambda b: b[0], f"and (24,) for {EXPERTS}.down_proj"),
        ("base_layer.lora_B", lambda b: b * np.nan, f"{EXPERTS}.gate_up_proj: lora_B has values that are not finite"),
        ("base_layer.lora_A", lambda a: None, f"{EXPERTS}.gate_up_proj has lora_B alone"),
    ],
)
def test_weights_of_experts_of_other_shapes_are_named(of_experts, end, change, reason):
    model, tensors, write = of_experts
    name = next(name for name in sorted(tensors) if f".0.mlp.{end}" in name or f".0.mlp.experts.{end}" in name)
    with np.errstate(invalid="ignore"):
        changed = change(tensors.pop(name))
    more = {} if changed is None else {name: np.ascontiguousarray(changed)}
    refused(model, write(tensors | more), reason)


def test_a_layer_whose_experts_are_missing_is_named(of_experts):
    model, tensors, write = of_experts
    rest = {name: tensor for name, tensor in tensors.items() if ".2.mlp." not in name}
    refused(model, write(rest), "target_parameters name model.layers.2.mlp.experts.down_proj, which")
    inner = "model.language_model.layers"
    seeing = {name.replace("model.layers", inner): tensor for name, tensor in rest.items() if ".self_attn." not in name}
    every = [f"{inner}.{i}.mlp.experts.{part}" for i in (0, 2, 3) for part in ("gate_up_proj", "down_proj")]
    folder = write(seeing, target_modules=[], target_parameters=every)
    refused(model, folder, f"target_parameters name {inner}.2.mlp.experts.down_proj, which")


def test_two_changes_of_one_matrix_are_named(of_experts):
    model, tensors, write = of_experts
    name = f"base_model.model.{EXPERTS}.lora_A.weight"
    for other in (name.replace("A.weight", "A.default.weight"), name.removeprefix("base_model.model.")):
        refused(model, write(tensors | {other: tensors[name]}), "has two tensors")
    again = name.replace("experts.", "experts.down_proj.")
    refused(model, write(tensors | {again: tensors[name]}), f"has two tensors base_model.model.{EXPERTS}.down_proj")
    apart = random_factors(TINY["qwen3-moe"]["shapes"], ends=("experts.0.down_proj", "experts.1.down_proj"))
    linear = [f"experts.{e}.down_proj" for e in (0, 1)]
    refused(
        model,
        write(tensors | peft_tensors(apart), target_modules=["q_proj", *linear]),
        "changes layers.0.experts.0.down, which another tensor of the file changes, too",
    )


def test_experts_that_are_named_and_all_missing_are_refused(tmp_path):
    model = load_model(make(tmp_path, "qwen3-moe"))
    factors = random_factors(TINY["qwen3-moe"]["shapes"], ends=("q_proj",))
    named = [f"experts.{e}.down_proj" for e in range(6)]
    folder = write_peft(tmp_path / "adapter", factors, target_modules=["q_proj", *named])
    refused(model, folder, "target_modules name model.layers.0.mlp.experts.0.down_proj, which")


def test_a_rank_of_experts_above_the_limit_is_refused(tmp_path):
    model = load_model(make(tmp_path, "gpt-oss"))
    factors = random_expert_factors(TINY["gpt-oss"]["shapes"], MAX_RANK + 1)
    folder = write_peft(tmp_path / "wide", factors, r=MAX_RANK + 1, target_modules=[])
    refused(model, folder, "has rank 257: a rank above 256 is not supported")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: a[:-1], "lora_A has shape (5, 4, 32), expected (6, 4, 32)"),
        (lambda a: a[0], "lora_A has shape (4, 32), expected (6, 4, 32)"),
        (lambda a: a[:, :2], "lora_B has shape (6, 12, 4), expected (6, 12, 2)"),
    ],
)
def test_factors_of_experts_of_other_shapes_in_gguf_files_are_named(tmp_path, change, reason):
    model = load_model(make(tmp_path, "qwen3-moe"))
    factors = random_factors(TINY["qwen3-moe"]["shapes"])
    metadata, tensors = gguf_parts(TINY["qwen3-moe"]["config"], factors)
    name = "blk.0.ffn_gate_exps.weight.lora_a"
    quant, shape, data = tensors[name]
    changed = change(data.view("<f4").reshape(shape))
    tensors[name] = quant, changed.shape, gguf_writer.f32(changed).ravel()
    path = gguf_writer.write(tmp_path / "adapter.gguf", metadata, tensors)
    refused(model, path, f"blk.0.ffn_gate_exps: {reason}")


def test_files_that_are_missing_damaged_or_cut_are_errors(model, folder, tmp_path):
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    for length in [0, 7, 8, size // 2, 8 + size, len(whole) // 2, len(whole) - 1]:
        weights.write_bytes(whole[:length])
        refused(model, folder)
    weights.unlink()
    refused(model, folder, "adapter_model.safetensors", "cannot be read")
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    refused(model, folder, "adapter_model.safetensors")
    weights.write_bytes(whole)
    (folder / "adapter_config.json").write_text("{")
    refused(model, folder, "not valid JSON")
    refused(model, tmp_path / "nowhere", "No such file")
    refused(model, weights, "expected b'GGUF'")


def gguf(tmp_path, metadata=(), tensors=None, factors=None):
    common, made = gguf_parts(TINY_MODEL["config"], factors or random_factors(TINY_MODEL["shapes"]))
    made = made if tensors is None else tensors(made)
    return gguf_writer.write(tmp_path / "adapter.gguf", common | dict(metadata), made)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.type": ("str", "model")}, "general.type is 'model'"),
        ({"adapter.type": ("str", "control_vector")}, "adapter.type is 'control_vector'"),
        ({"general.architecture": ("str", "qwen2")}, "is for the architecture 'qwen2', the model is 'llama'"),
        ({"general.architecture": ("str", "unheard")}, "is for the architecture 'unheard'"),
        ({"adapter.lora.alpha": ("str", "8")}, "adapter.lora.alpha is '8'"),
        ({"adapter.lora.alpha": ("f32", float("nan"))}, "adapter.lora.alpha is nan"),
        ({"adapter.lora.alpha": ("f32", 3e38)}, "the scale of its change is"),
        ({"adapter.alora.invocation_tokens": ("[u32]", [1])}, "adapter.alora.invocation_tokens"),
    ],
)
def test_metadata_of_other_adapters_is_named(model, tmp_path, metadata, reason):
    refused(model, gguf(tmp_path, metadata), reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {k: v for k, v in t.items() if "attn_q" in k or k.endswith("lora_a")}, "has lora_a alone"),
        (lambda t: {"output_norm.weight": t["blk.0.attn_q.weight.lora_a"]}, "output_norm.weight"),
        (lambda t: {"blk.9.attn_q.weight.lora_a": t["blk.0.attn_q.weight.lora_a"]}, "blk.9.attn_q"),
        (lambda t: t | {"blk.0.attn_q.weight.lora_a": t["blk.0.ffn_down.weight.lora_a"]}, "expected (4, 32)"),
        (lambda t: {}, "has no weights"),
    ],
)
def test_tensors_of_other_adapters_are_named(model, tmp_path, change, reason):
    refused(model, gguf(tmp_path, tensors=change), reason)


def test_a_cut_gguf_file_is_an_error(model, tmp_path):
    whole = gguf(tmp_path).read_bytes()
    for length in [3, 23, 200, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        refused(model, tmp_path / "cut.gguf")


def test_a_pattern_needs_the_package_that_reads_it(model, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "regex", None)
    read_lora(folder, model.spec, model.family)
    change_config(folder, target_modules=".*_proj")
    refused(model, folder, "foreword[templates]")


@pytest.mark.parametrize(
    ("name", "module", "known"),
    [
        ("lfm2", "model.layers.0.conv.conv", "conv.in_proj, conv.out_proj, feed_forward.w1"),
        (
            "gemma3n",
            "model.layers.0.altup.router_norm",
            "altup.modality_router, altup.prediction_coefs, laurel.linear_left",
        ),
        ("qwen3-moe", "model.layers.1.mlp.experts.0.up_proj", "mlp.gate, mlp.gate_proj"),
    ],
)
def test_a_matrix_that_is_not_changed_is_named_with_those_that_are(tmp_path, name, module, known):
    factors = {module: (np.ones((4, 32), np.float32), np.ones((32, 4), np.float32))}
    folder = write_peft(tmp_path / "adapter", factors)
    reason = f"changes {module}, which is not supported for this model (of each layer: "
    refused(load_model(make(tmp_path, name)), folder, reason, known, "without changes of other weights")


def test_a_gguf_adapter_of_another_architecture_is_named(tmp_path):
    hybrid = load_model(make(tmp_path, "qwen3-next"))
    gguf = gguf_writer.write(
        tmp_path / "adapter.gguf", *gguf_parts(TINY_MODEL["config"], random_factors(TINY_MODEL["shapes"]))
    )
    refused(hybrid, gguf, "is for the architecture 'llama', the model is 'qwen3_next'")


@pytest.mark.parametrize(("name", "architecture"), [("bamba", "bamba"), ("cwm", "cwm"), ("opt", "opt")])
def test_a_gguf_adapter_is_refused_if_llama_cpp_has_no_architecture_for_the_model(tmp_path, name, architecture):
    path = gguf(tmp_path)
    reason = f"is for the architecture 'llama', and GGUF adapters for {architecture!r} models are not supported"
    refused(load_model(make(tmp_path / name, name)), path, reason, "PEFT directory")


@pytest.mark.parametrize("name", ["mistral", "internlm3"])
def test_a_gguf_adapter_of_llama_is_taken_for_families_whose_gguf_files_are_of_llama(tmp_path, name):
    model = load_model(make(tmp_path, name))
    tiny = TINY[name]
    parts = gguf_parts(tiny["config"], random_factors(tiny["shapes"]))
    assert read_lora(gguf_writer.write(tmp_path / "adapter.gguf", *parts), model.spec, model.family).pairs
