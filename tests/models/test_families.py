"""Every family on a tiny random model, against logits recorded from transformers (tests/data/models/make_tiny.py)."""

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.config import Config
from foreword.models.families import FAMILIES
from foreword.models.loader import load_model
from foreword.models.safetensors import read_directory
from models.recorded import TINY, WITHOUT_LOGITS, assert_logits, make
from models.running import EXECUTORS
from models.tiny import random_tensors, write_model


@pytest.mark.one_in(7)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", TINY)
def test_logits_equal_those_of_transformers(tmp_path, name, executor):
    assert_logits(load_model(make(tmp_path, name)), name, executor)


def with_stacked_experts(tensors):
    """The tensors of a checkpoint, with the experts of a layer in one tensor if they have gates."""
    if not any(key.endswith(".experts.0.gate_proj.weight") for key in tensors):
        return tensors
    found, experts = {}, {}
    for key, value in tensors.items():
        if of_expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", key):
            experts.setdefault(of_expert[1], {}).setdefault(of_expert[3], []).append((int(of_expert[2]), value))
        else:
            found[key] = value
    for prefix, parts in experts.items():
        gate, up, down = (
            np.stack([v for _, v in sorted(parts[p], key=lambda e: e[0])]) for p in ("gate", "up", "down")
        )
        found |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
    return found


def renamed_parts(name):
    """Return those of a family but for Hunyuan 4, whose parts follow from each other (test_hunyuan4.py)."""
    family = FAMILIES.get(TINY[name]["config"]["model_type"])
    return family.renamed if family and not name.startswith("hy-v4") else {}


@pytest.mark.parametrize("name", [*filter(renamed_parts, TINY)])
def test_a_checkpoint_may_have_the_names_of_the_modules_of_transformers(tmp_path, name):
    """The experts of a layer are in one tensor. The tiny models have the names that transformers writes."""
    tensors = with_stacked_experts(random_tensors(TINY[name]["shapes"]))
    for part, own in renamed_parts(name).items():
        tensors = {
            key.replace(part, own) if part in key else key.replace(own, part): value for key, value in tensors.items()
        }
    assert_logits(load_model(write_model(tmp_path / "model", TINY[name]["config"], tensors)), name)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "gptj", "opt", "phi", "llama3", "qwen3"])
def test_a_checkpoint_may_have_names_without_that_of_the_model(tmp_path, name):
    tensors = random_tensors(TINY[name]["shapes"])
    if name == "gpt2":  # some have the head, which is the embedding
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    tensors = {re.sub(r"^(transformer|gpt_neox|model)\.", "", key): value for key, value in tensors.items()}
    assert_logits(load_model(write_model(tmp_path / "model", TINY[name]["config"], tensors)), name)


def test_a_head_of_its_own_is_found_beside_names_without_that_of_the_model(tmp_path):
    tensors = random_tensors({**TINY["gpt2"]["shapes"], "lm_head.weight": [48, 32]})
    bare = {key.removeprefix("transformer."): value for key, value in tensors.items()}
    head = load_model(write_model(tmp_path / "model", TINY["gpt2"]["config"], bare)).weights["lm_head"]
    np.testing.assert_array_equal(head.dequantize(), tensors["lm_head.weight"])


def test_a_checkpoint_without_the_biases_of_its_routers_has_none_and_a_norm_of_a_dense_layer_is_left_out(tmp_path):
    config, tensors = TINY["axk1"]["config"], random_tensors(TINY["axk1"]["shapes"])
    bias = "mlp.gate.e_score_correction_bias"
    zeros = {name: np.zeros_like(value) if name.endswith(bias) else value for name, value in tensors.items()}
    less = {name: value for name, value in tensors.items() if not name.endswith(bias)}
    less["model.layers.0.post_mlp_layernorm.weight"] = np.ones(32, "<f4")
    want, found = (load_model(write_model(tmp_path / name, config, own)) for name, own in (("a", zeros), ("b", less)))
    assert want.weights.keys() == found.weights.keys()
    for name, tensor in want.weights.items():
        np.testing.assert_array_equal(found.weights[name].dequantize(), tensor.dequantize())


FUSED = {"self_attn": ("qkv_proj", "qkv"), "mlp": ("gate_up_proj", ("gate", "up"))}


def with_fused_rows(tensors):
    """The tensors of a checkpoint, with queries, keys and values in one tensor, and gate and up in another one."""
    tensors = dict(tensors)
    for module, (one, parts) in FUSED.items():
        for key in [key for key in tensors if re.search(rf"\.{module}\.{parts[0]}_proj\.", key)]:
            own = [tensors.pop(key.replace(f".{parts[0]}_proj", f".{part}_proj")) for part in parts]
            tensors[key.replace(f"{parts[0]}_proj", one)] = np.concatenate(own)
    return tensors


@pytest.mark.parametrize("are_biases_apart", [False, True])
@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "gemma3", "ernie4_5-biases", "dots1", "hunyuan"])
def test_queries_keys_and_values_may_be_in_one_tensor_as_gate_and_up(tmp_path, name, are_biases_apart):
    apart = random_tensors(TINY[name]["shapes"])
    tensors = with_fused_rows(apart)
    if are_biases_apart:
        tensors = {key: value for key, value in tensors.items() if key in apart or not key.endswith("bias")}
        tensors |= {key: value for key, value in apart.items() if key.endswith("bias")}
    assert_logits(load_model(write_model(tmp_path / "model", TINY[name]["config"], tensors)), name)


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("name", "changed", "error"),
    [
        ("mistral", lambda t: {f"{LAYER}self_attn.qkv_proj.weight": t(66, 32)}, r"qkv_proj.weight has shape \(66, 32"),
        ("mistral", lambda t: {f"{LAYER}mlp.gate_up_proj.weight": t(78, 32)}, r"gate_up_proj.weight .* \(78, 32\)"),
        ("mistral", lambda t: {f"{LAYER}self_attn.qkv_proj.bias": t(64)}, r"qkv_proj.bias is not part of"),
        ("mistral", lambda t: {f"{LAYER}self_attn.k_proj.weight": t(16, 32)}, r"k_proj.weight is not part of"),
        ("qwen2", lambda t: {f"{LAYER}self_attn.qkv_proj.bias": t(65)}, r"qkv_proj.bias has shape \(65,\)"),
        ("qwen2", lambda t: {f"{LAYER}mlp.experts.gate_up_proj": t(2, 80, 32)}, r"experts.gate_up_proj is not part of"),
        ("arcee", lambda t: {f"{LAYER}mlp.gate_up_proj.weight": t(80, 32)}, r"gate_up_proj.weight is not part of"),
    ],
)
def test_a_fused_tensor_of_another_size_or_model_is_refused(tmp_path, name, changed, error):
    tensors = random_tensors(TINY[name]["shapes"])
    fused = tensors if name == "arcee" else with_fused_rows(tensors)
    tensors = {**fused, **changed(lambda *shape: np.ones(shape, "<f4"))}
    with pytest.raises(ModelError, match=error):
        load_model(write_model(tmp_path / "model", TINY[name]["config"], tensors))


@pytest.mark.parametrize("name", [*filter(renamed_parts, TINY)])
def test_a_weight_by_two_names_is_refused(tmp_path, name):
    tensors = random_tensors(TINY[name]["shapes"])
    for part, own in renamed_parts(name).items():
        other = own if any(part in key for key in tensors) else part
        more = {key.replace(part, other).replace(own, other): value for key, value in tensors.items()}
        key = next((key for key in more if key not in tensors), None)
        if key is None:  # stacked experts: the tiny models have them one by one
            continue
        with pytest.raises(ModelError, match="are the same weight"):
            load_model(write_model(tmp_path / "model", TINY[name]["config"], {**tensors, key: more[key]}))


def test_each_layer_may_have_its_own_number_of_experts_per_token():
    config = TINY["hunyuan-moe"]["config"] | {"moe_topk": [2, 1, 3, 2]}
    spec = FAMILIES["hunyuan_v1_moe"].read(Config(Path("config.json"), config))
    assert [layer.moe.experts_per_token for layer in spec.layers] == [2, 1, 3, 2]
    with pytest.raises(ModelError, match=r"moe_topk \[2, 1\] is not 4 numbers of experts"):
        FAMILIES["hunyuan_v1_moe"].read(Config(Path("config.json"), config | {"moe_topk": [2, 1]}))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-moe"])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_text_model_of_a_model_of_images_is_run(tmp_path, name, stacked):
    """The tensors of a head have another prefix, and may have the experts of a layer in one tensor."""
    tiny = TINY[name]
    tensors = random_tensors(tiny["shapes"])
    tensors = {
        key.replace("model.", "model.language_model.", 1): value
        for key, value in (with_stacked_experts(tensors) if stacked else tensors).items()
    }
    tensors["model.visual.patch.weight"] = np.ones((2, 2), "<f4")
    outer = {"model_type": tiny["config"]["model_type"].removesuffix("_text"), "text_config": tiny["config"],
             "vocab_size": tiny["config"]["vocab_size"]}  # fmt: skip
    assert_logits(load_model(write_model(tmp_path / "model", outer, tensors)), name)


def test_the_text_model_of_llama_4_with_images_is_run(tmp_path):
    """The tensors have a prefix, others belong to images, and the configuration may be an older one."""
    tiny = TINY["llama4-plain"]
    tensors = {f"language_model.{key}": value for key, value in random_tensors(tiny["shapes"]).items()}
    tensors |= {name: np.ones((2, 2), "<f4") for name in ("vision_model.a", "multi_modal_projector.b")}
    text = older({**tiny["config"], "attn_temperature_tuning": False})
    outer = {"model_type": "llama4", "text_config": text, "vocab_size": text["vocab_size"]}
    assert_logits(load_model(write_model(tmp_path / "model", outer, tensors)), "llama4-plain")


@pytest.mark.parametrize(
    ("name", "outer"),
    [("ministral3", "mistral3"), ("mistral", "mistral3"), ("aria", "aria"), ("cohere-compass", "cohere_compass")],
)  # in older files of Mistral 3, the text model is a Mistral
def test_the_text_model_beside_other_encoders_is_run(tmp_path, name, outer):
    tiny = TINY[name]
    tensors = {f"language_model.{key}": value for key, value in random_tensors(tiny["shapes"]).items()}
    tensors |= {name: np.ones((2, 2), "<f4") for name in ("vision_tower.a", "multi_modal_projector.b")}
    config = {"model_type": outer, "text_config": tiny["config"], "vocab_size": tiny["config"]["vocab_size"]}
    model = load_model(write_model(tmp_path / name, config, tensors))
    assert model.spec.architecture == tiny["config"]["model_type"]
    assert_logits(model, name)


@pytest.mark.parametrize(("outside", "inside"), [(True, False), (True, None), (None, True), (False, True)])
def test_a_model_of_images_without_a_head_is_tied_if_either_of_its_configurations_says_so(tmp_path, outside, inside):
    tensors = {f"language_model.{key}": value for key, value in random_tensors(TINY["mistral"]["shapes"]).items()}
    del tensors["language_model.lm_head.weight"]
    text = {**TINY["mistral"]["config"], "tie_word_embeddings": inside}
    outer = {"model_type": "mistral3", "text_config": text, "vocab_size": 48, "tie_word_embeddings": outside}
    model = load_model(write_model(tmp_path, outer, tensors))
    assert model.spec.tie_embeddings
    assert "lm_head" not in model.weights


def test_every_family_has_recorded_logits():
    assert {tiny["config"]["model_type"] for tiny in TINY.values()} == set(FAMILIES) - WITHOUT_LOGITS.keys()


def test_the_recorded_models_are_those_of_the_script():
    script = (Path(__file__).parents[1] / "data" / "models" / "make_tiny.py").read_text(encoding="utf-8")
    of_kind = {
        f"{name}-biased" for name in re.findall(r'"([\w-]+)": \("', script.partition("\nBIASES")[2].partition("\n}")[0])
    }
    assert {*re.findall(r'^    "([\w-]+)": transformers\.', script, re.M), *of_kind} == set(TINY)


def test_models_of_one_model_type_are_told_apart_by_their_class(tmp_path):
    path = make(tmp_path, "bailing2", model_type="bailing_moe")
    assert_logits(load_model(path), "bailing2")
    config = {**json.loads((path / "config.json").read_text()), "architectures": ["BailingMoeForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"routed_scaling_factor = 1\.5 is not supported"):
        load_model(path)


def test_convolutions_of_other_sizes_are_not_joined(tmp_path):
    tiny = TINY["olmo-hybrid"]
    tensors = random_tensors(tiny["shapes"])
    name = next(name for name in tensors if name.endswith("k_conv1d.weight"))
    tensors[name] = tensors[name][..., 1:]
    with pytest.raises(ModelError, match=r"q_conv1d\.weight, .*v_conv1d\.weight are not rows of one"):
        load_model(write_model(tmp_path / "model", tiny["config"], tensors))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dbrx", {"clip_qkv": 2.0}, r"clip_qkv = 2\.0 is not supported"),
        ("dbrx", {"intermediate_size": 7}, "intermediate_size = 7 is not supported"),
        ("mpt", {"clip_qkv": 2.0}, r"clip_qkv = 2\.0 is not supported"),
        (
            "dbrx",
            {"ffn_config": {**TINY["dbrx"]["config"]["ffn_config"], "moe_top_k": 99}},
            "ffn_config: a token cannot take 99 experts of 4 experts",
        ),
        (
            "dbrx",
            {"attn_config": {**TINY["dbrx"]["config"]["attn_config"], "kv_n_heads": 1}},
            "attn_config: kv_n_heads = 1, num_key_value_heads = 2",
        ),
        (
            "dbrx",
            {"ffn_config": {**TINY["dbrx"]["config"]["ffn_config"], "ffn_act_fn": {"name": ["silu"]}}},
            "ffn_act_fn",
        ),
        ("laguna", {"num_attention_heads_per_layer": 4}, "num_attention_heads_per_layer"),
    ],
)
def test_a_key_in_another_place_or_of_another_form_is_refused(tmp_path, name, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(make(tmp_path, name, **changes))


def older(config):
    """The configuration in the form that transformers wrote before version 5."""
    config = dict(config)
    if "rope_parameters" not in config:  # no layer rotates
        return config
    parameters, kind = config.pop("rope_parameters"), "type"
    if "full_attention" in parameters:
        kind = "rope_type"
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    config[FAMILIES[config["model_type"]].keys["rope_theta"].label] = parameters["rope_theta"]
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "rope_type")}
    config["rope_scaling"] = {kind: parameters["rope_type"], **scaling} if scaling else None
    return config


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in TINY
        if not name.startswith(
            ("gemma4", "lfm3", "mellum", "laguna", "cohere2-moe", "cohere-compass", "mimo", "modernbert", "zaya")
        )
    ],
)  # their configurations were never older, or transformers ignores older ones
def test_an_older_configuration_gives_the_same_spec(tmp_path, name):
    config = TINY[name]["config"]
    if name == "olmo3":  # sliding layers of an older one have this base
        rules = {kind: {**rule, "rope_theta": 5e5} for kind, rule in config["rope_parameters"].items()}
        config = {**config, "rope_parameters": rules}
    folder = make(tmp_path, name, **config)
    new = load_model(folder).spec
    (folder / "config.json").write_text(json.dumps(older(config)))
    assert load_model(folder).spec == new


def test_su_is_an_alias_of_longrope(tmp_path):
    folder = make(tmp_path, "phi3-longrope")
    new = load_model(folder).spec
    config = older(TINY["phi3-longrope"]["config"])
    config["rope_scaling"]["type"] = "su"
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).spec == new


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3", "gemma4-plain", "qwen2-sliding", "smollm3", "mistral", "qwen3-next"]
)
def test_layers_follow_the_rule_of_the_family_if_the_configuration_does_not_list_them(tmp_path, name):
    folder = make(tmp_path, name)
    listed = load_model(folder).spec
    config = {k: v for k, v in TINY[name]["config"].items() if k not in ("layer_types", "no_rope_layers")}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).spec == listed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "resnet"},
            r"config\.json: model_type 'resnet' is not supported\. Supported .* gemma2, .*qwen2",
        ),
        ({"model_type": None}, "model_type is missing"),
        (
            {"hidden_size": 64},
            r"tensor model\.embed_tokens\.weight \(embed\) has shape \(48, 32\), expected \(48, 64\)",
        ),
        ({"hidden_size": "32"}, "hidden_size is '32', not of type int"),
        ({"num_hidden_layers": 5}, r"tensor model\.layers\.4\.input_layernorm\.weight .* is missing"),
        ({"num_key_value_heads": 3}, "4 heads are not a multiple of 3"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 is not from 1 to"),
        ({"head_dim": 7}, "7 dimensions, not an even number"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "rope_type 'axial' is not supported"),
    ],
)
def test_an_invalid_configuration_is_explained(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(make(tmp_path, "llama3", **changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bamba", {"mamba_proj_bias": True}, r"tensor model\.layers\.0\.mamba\.in_proj\.bias .* is missing"),
        ("bamba", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit = \[0.0, 0.1\] is not supported"),
        ("bamba", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("bamba", {"mamba_d_head": 5}, "8 heads of mamba_d_head = 5 are not mamba_expand"),
        ("bamba", {"mamba_n_groups": 3}, "8 recurrent heads are not a multiple of 3 key heads"),
        ("bamba", {"mamba_d_state": 16}, r"in_proj\.weight .* has shape"),
        ("bamba", {"mamba_d_conv": 3}, r"conv1d\.weight .* has shape \(88, 1, 4\), expected \(88, 3\)"),
        ("qwen3-next", {"layer_types": ["mamba"] * 4}, "is not 4 of full_attention and linear_attention"),
        ("granite-hybrid-dense", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("qwen3_5-moe", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        ("nemotron-h", {"layers_block_type": ["mlp", "mlp"]}, "neither mamba nor attention layers"),
        ("nemotron-h", {"tie_word_embeddings": True}, "tie_word_embeddings = True, while the head"),
        ("qwen3-next", {"linear_value_head_dim": 13}, r"in_proj_qkvz\.weight .* has shape \(136, 32\)"),
    ],
)  # fmt: skip
def test_an_invalid_recurrent_layer_is_explained(tmp_path, name, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(make(tmp_path, name, **changes))


def test_an_end_token_beyond_the_vocabulary_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match=r"llama3: eos token id 48 is not below vocab_size 48\. Use .* same model"):
        load_model(make(tmp_path, "llama3", eos_token_id=[1, 48]))


@pytest.mark.parametrize("model", [None, "", 5, b"llama", "a" * 300, "\0", "a\0/b", "\ud800"])
def test_what_names_no_model_is_a_model_error(model):
    with pytest.raises(ModelError):
        load_model(model)


NONSENSE = [None, 0, -1, 1, 3, 2**31, 2**70, 1e300, 0.0, -2.5, float("nan"), "x", [], [1], {}, {"a": 1}, True]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "name", ["llama3", "llama-yarn", "qwen3-moe", "gemma3", "phi3-longrope", "smollm3", "bamba", "qwen3-next"]
)
def test_any_invalid_configuration_is_a_model_error(tmp_path, name):
    folder = make(tmp_path, name)
    config = TINY[name]["config"]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    changed = [{**config, key: value} for key in config for value in NONSENSE]
    changed += [{**config, "rope_parameters": {**rope, key: value}} for key in rope for value in NONSENSE]
    for values in changed:
        (folder / "config.json").write_text(json.dumps(values))
        with contextlib.suppress(ModelError):
            load_model(folder)


def test_every_damage_to_a_safetensors_header_is_a_model_error(tmp_path):
    folder = make(tmp_path, "phi3")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for cut in [*range(0, header, 97), header, len(data) - 1]:
        path.write_bytes(data[:cut])
        with pytest.raises(ModelError, match=r"model\.safetensors|is missing"):
            load_model(folder)
    rng = np.random.default_rng(0)
    for at in rng.integers(0, header, 150):
        damaged = bytearray(data)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            load_model(folder)


def test_missing_files_and_unknown_names_are_model_errors(tmp_path):
    with pytest.raises(ModelError, match=r"absent\.gguf: the file or directory does not exist"):
        load_model(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match=r"has no config\.json and 0 \.gguf files"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="did you mean 'smollm2'"):
        load_model("smollm")
    folder = make(tmp_path, "llama3")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_model(folder)


def damaged(tmp_path, changes):
    """A safetensors file whose first entry has these changes."""
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}} | {
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
    }
    header["a"] |= changes
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": {}}, "is not a dtype, a shape and data_offsets"),
        ({"shape": [float("inf")]}, "is not a dtype, a shape and data_offsets"),
        ({"data_offsets": [0.0, 8.0]}, "is not a dtype, a shape and data_offsets"),
        ({"shape": [-1]}, "is not a dtype, a shape and data_offsets"),
        ({"shape": [0]}, r"shape \[0\] of F32 does not fit bytes 0 to 8 of 16"),
        ({"dtype": "F64"}, "dtype 'F64' is not supported"),
        ({"data_offsets": [4, 12]}, "tensors 'a' and 'b' overlap"),
        ({"data_offsets": [12, 20]}, "does not fit bytes 12 to 20 of 16"),
        ({"data_offsets": [-8, 0]}, "does not fit bytes -8 to 0 of 16"),
    ],
)
def test_a_wrong_entry_of_a_safetensors_header_is_named(tmp_path, changes, message):
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{message}"):
        read_directory(damaged(tmp_path, changes))


@pytest.mark.parametrize("name", ["\0", "\ud800", "a" * 300, "absent"])
def test_a_shard_that_cannot_be_opened_is_named(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="cannot be read"):
        read_directory(tmp_path)


@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, "9" * 5000, '{"a": 1', "\ud800", "[1]", ""])
def test_json_of_any_kind_is_a_model_error(tmp_path, text):
    folder = make(tmp_path, "llama3")
    (folder / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ModelError, match=r"config\.json: .*etch it again"):
        load_model(folder)
