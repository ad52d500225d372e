"""Values of wrong types and shapes in a model's files are refused, by file, key and value."""

import json
import math
from contextlib import suppress
from pathlib import Path

import pytest

from foreword.errors import ModelError
from foreword.models.config import Config
from foreword.models.families import FAMILIES
from foreword.models.families.encoders import ENCODER_FAMILIES
from foreword.models.keys import ONLY_IN_GGUF
from foreword.models.loader import load_model
from foreword.models.rope import ROPE_TYPES
from models.pooling_models import POOLING
from models.recorded import TINY, WITHOUT_LOGITS
from models.tiny import random_tensors, write_model

PATH = Path("config.json")
NONSENSE = (
    [],
    {},
    "x",
    "",
    -1,
    1e30,
    2.5,
    True,
    ["x"],
    [1.5],
    [-1],
    [99],
    [None],
    {"x": 1},
    math.nan,
    math.inf,
    10**30,
)
NAMES = {tiny["config"]["model_type"]: name for name, tiny in reversed(TINY.items())}
CONFIGS = {
    **{model_type: TINY[name]["config"] for model_type, name in NAMES.items()},
    **{model_type: POOLING[name]["config"] for model_type, name in WITHOUT_LOGITS.items()},
}
BERT = {"vocab_size": 48, "hidden_size": 32, "embedding_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip


def accepted(read, config, key):
    """The values of `NONSENSE` with which a key is read."""
    found = []
    for value in NONSENSE:
        try:
            read({**config, key: value})
        except ModelError:
            continue
        found.append(value)
    return found


def is_number(value):
    return type(value) in (int, float)


_OWN_ROTARY = (
    "zaya",
    "mellum",
    "laguna",
    "lfm3",
    "gemma4_text",
    "gemma4_unified_text",
    "gptj",
    "codegen",
    "mimo_v2_flash",
    "embedding_gemma2_text",
)
LISTS = {
    "mlp_only_layers": [[]],
    "moe_layers": [[]],
    "attn_layer_indices": [[]],
    ("llama4_text", "no_rope_layers"): [[]],
    **{(name, "rope_scaling"): [] for name in ("gptj", "codegen", "cohere2_moe")},
    **{(name, "rope_parameters"): [] for name in _OWN_ROTARY},
    **{("kimi_linear", key): [{}, {"x": 1}] for key in ("rope_scaling", "rope_parameters")},  # it rotates nothing
    "full_attn_idxs": [[]],
    "rope_scaling": [{}],
    "rope_parameters": [{}],
    "pruned_heads": [{}],
    "per_layer_config": [{}],
    "attn_config": [{}],
    ("dbrx", "attn_config"): [],  # its number of key/value heads would contradict the other one
    "linear_attn_config": [{}],
    "ffn_config": [{}],
    "auto_map": [{}, {"x": 1}],
}
"""Values that are no numbers and no flags, and that these keys may have."""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("model_type", [*FAMILIES, *ENCODER_FAMILIES])
def test_a_key_of_a_wrong_type_is_refused_also_where_nothing_reads_it(model_type):
    family = {**FAMILIES, **ENCODER_FAMILIES}[model_type]
    config = CONFIGS.get(model_type, BERT)
    for key in family.keys:
        if key.startswith(ONLY_IN_GGUF):  # which has no influence in a directory
            continue
        values = accepted(lambda values: family.read(Config(PATH, values)), config, family.keys[key].label)
        others = [value for value in values if not is_number(value) and value is not True]
        assert others == LISTS.get((model_type, key), LISTS.get(key, [])), key
        assert not [value for value in values if is_number(value) and not math.isfinite(value)], key
        assert not (True in values and any(map(is_number, values))) or family.keys[key].values, key


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_is_null_is_read_or_refused(model_type):
    family, config = FAMILIES[model_type], CONFIGS[model_type]
    for key in {*config, *(key.label for key in family.keys.values())} - {"model_type"}:
        with suppress(ModelError):
            family.read(Config(PATH, {**config, key: None}))


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_rotary_parameters_of_a_wrong_type_are_refused(kind):
    config = {**TINY[NAMES["llama"]]["config"]}
    half = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
    every = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
             **dict.fromkeys(("short_factor", "long_factor", "divisors"), [1.0] * half)}  # fmt: skip
    keys = ROPE_TYPES[kind]
    own = {name: value for name, value in every.items() if name in keys and not keys[name].values}
    own |= {"rope_type": kind, "rope_theta": 1e4} | ({"mrope_section": [half]} if kind == "mrope" else {})

    def read(parameters):
        FAMILIES["llama"].read(Config(PATH, {**config, "rope_parameters": parameters}))

    read(own)
    for key in keys:
        others = [value for value in accepted(read, own, key) if not is_number(value) and value is not True]
        assert others == ([[]] if key == "mrope_section" and kind != "mrope" else []), key


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": ["x"]}, "mlp_only_layers has 'x', not an integer from 0 to 3"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers has 4, not an integer from 0 to 3"),
        ("qwen3_moe", {"num_experts": None, "num_local_experts": -1}, "num_local_experts = -1 is below 0"),
        ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset = 3 of attn_layer_period = 3"),
        ("jamba", {"expert_layer_offset": 2}, "expert_layer_offset = 2 of expert_layer_period = 2"),
        ("jamba", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 of 4 experts"),
        ("mamba2", {"time_step_limit": [0.001, 0.1]}, r"time_step_limit = \[0.001, 0.1\] is not supported"),
        ("mamba2", {"num_heads": 5}, r"5 heads of head_dim = 16 are not expand \* hidden_size = "),
        ("mamba", {"time_step_rank": 0}, "time_step_rank = 0 is not from 1"),
        ("recurrent_gemma", {"block_types": ["mamba"]}, r"block_types \['mamba'\] are not of recurrent and attention"),
        ("recurrent_gemma", {"block_types": []}, r"block_types \[\] are not of"),
        ("recurrent_gemma", {"lru_width": 50}, "lru_width = 50 is not a multiple of num_attention_heads = 4"),
        ("recurrent_gemma", {"logits_soft_cap": 0.0}, "logits_soft_cap = 0.0 is not above zero"),
        (
            "recurrent_gemma",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_type 'linear' is not supported",
        ),
        ("longcat_flash", {"head_dim": 2}, "head_dim = 2 is not supported"),
        ("kolibri1", {"moe_intermediate_size": None}, "moe_intermediate_size = None is not supported"),
        ("zamba2", {"layers_block_type": ["hybrid"] * 3}, "layers_block_type .* is not 5 of mamba and"),
        ("zamba2", {"layers_block_type": ["full_attention"] * 5}, "layers_block_type .* is not 5 of mamba and"),
        ("zamba2", {"hybrid_layer_ids": [0]}, r"hybrid_layer_ids = \[0\] is not supported"),
        ("zamba2", {"attention_hidden_size": 32}, "attention_hidden_size = 32 is not supported"),
        ("zamba2", {"num_mem_blocks": 0}, "num_mem_blocks = 0 is not from 1"),
        ("zamba2", {"add_bias_linear": True}, "add_bias_linear = True is not supported"),
        ("zamba2", {"use_long_context": True}, "use_long_context = True is not supported"),
        ("hrm_text", {"num_hidden_layers": 2}, r"num_hidden_layers = 2 is not \d runs of num_layers_per_stack = \d"),
        ("hrm_text", {"num_layers_per_stack": 0}, "num_layers_per_stack = 0 is not from 1"),
        ("hrm_text", {"L_cycles": 0}, "L_cycles = 0 is not from 1"),
        ("hrm_text", {"H_cycles": 4000}, r"12000 runs of \d layers are more than 4096"),
        ("hrm_text", {"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported"),
        ("hrm_text", {"embedding_scale": None, "initializer_range": 0}, "initializer_range = 0.* is not above zero"),
        ("zaya", {"layer_types": ["full_attention"] * 4}, "layer_types .* is not 4 of hybrid and hybrid_sliding"),
        ("zaya", {"layer_types": ["hybrid"]}, r"layer_types \['hybrid'\] is not 4 of"),
        ("zaya", {"num_experts_per_tok": 2}, "num_experts_per_tok = 2 is not supported"),
        ("zaya", {"cca_time0": 1, "cca_time1": 1}, "cca_time0 = cca_time1 = 1 is not supported"),
        ("zaya", {"head_dim": 5, "num_key_value_heads": 1}, "5 values are not two halves"),
        ("zaya", {"sliding_window": None}, "sliding_window"),
        ("zaya", {"rope_parameters": {"hybrid": {"rope_theta": 1e4}}}, "no rope_theta for hybrid_sliding"),
        ("zaya", {"rope_parameters": {"rope_type": "default"}}, "no rope_theta for hybrid"),
        (
            "zaya",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "no rope_theta for hybrid",
        ),
        ("bamba", {"attn_layer_indices": [True]}, "attn_layer_indices has True, not an integer from 0"),
        ("qwen3", {"layer_types": []}, r"layer_types \[\] is not 4 of full_attention and sliding_attention"),
        ("qwen3", {"layer_types": ["x"] * 4}, "layer_types .* is not 4 of full_attention"),
        ("smollm3", {"no_rope_layers": []}, r"no_rope_layers \[\] is not 4 of 0 and 1"),
        ("smollm3", {"no_rope_layers": ["x"] * 4}, "no_rope_layers .* is not 4 of 0 and 1"),
        ("mistral", {"sliding_window": 2**31}, "sliding_window = 2147483648 is above 2147483647"),
        *((model_type, {"sliding_window": 0, "layer_types": None}, "sliding_window = 0, but some layers are sliding")
          for model_type in ("mistral", "gemma2", "exaone4", "afmoe", "cohere2", "flint", "granite_swa")),
        *((model_type, {"sliding_window": None, "layer_types": None}, "= None, but some layers are sliding")
          for model_type in ("afmoe", "cohere2", "flint", "granite_swa", "granitemoe_swa")),
        *((model_type, {key: -1}, f"{key} = -1 is below 0")
          for key, types in {
              "num_shared_experts": ("afmoe", "exaone_moe", "hy_v3"), "n_shared_experts": ("deepseek_v3", "glm4_moe"),
              "moe_num_shared_experts": ("aria_text",), "shared_intermediate_size": ("granitemoe", "granitemoe_swa"),
          }.items() for model_type in types),
        *((name, {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, **local}},
           "rope_parameters has no rope_theta for sliding_attention")
          for name in ("mellum", "gemma4_text")
          for local in ({}, {"sliding_attention": None}, {"sliding_attention": {"rope_type": "default"}})),
        ("gemma3_text", {"_sliding_window_pattern": 0, "sliding_window_pattern": None, "layer_types": None},
         "_sliding_window_pattern = 0 is not from 1"),
        ("llama", {"rope_scaling": []}, r"rope_scaling is \[\], not an object"),
        ("llama", {"rope_parameters": {"rope_type": "default", "type": "yarn", "rope_theta": 1e4}},
         "rotary parameters have type = 'yarn', rope_type = 'default'"),
        ("phi3", {"partial_rotary_factor": -1.0}, "partial_rotary_factor = -1.0 is not above 0"),
        ("llama", {"mlp_bias": 0}, "mlp_bias"),
        *(("exaone4", {"layer_types": None, "sliding_window": 6, "sliding_window_pattern": pattern}, message)
          for pattern, message in (
              ("GL", "sliding_window_pattern = 'GL' is not supported"), ("L", "= 'L' is not"), ("LG\n", "is not"),
              ("LGLG", "= 'LGLG' is not"), (0, "= 0 is not from 1"), (-2, "= -2 is not from 1"),
              (None, "sliding_window_pattern is null beside a sliding_window"))),
    ],
)  # fmt: skip
def test_the_error_has_the_key_and_what_it_may_be(model_type, changes, message):
    with pytest.raises(ModelError, match=message):
        FAMILIES[model_type].read(Config(PATH, {**TINY[NAMES[model_type]]["config"], **changes}))


@pytest.mark.parametrize("pattern", [1, 2, 3, 4, 9, "G", "LG", "LLG", "LLLG"])
def test_windows_of_exaone_are_those_of_the_rule_of_transformers(pattern):
    """Letters count as their number: the layers that transformers lists in layer_types for such a model."""
    changes = {"layer_types": None, "sliding_window": 6, "sliding_window_pattern": pattern}
    spec = FAMILIES["exaone4"].read(Config(PATH, {**TINY["exaone4"]["config"], **changes}))
    every = len(pattern) if isinstance(pattern, str) else pattern
    expected = [6 if (i + 1) % every != 0 else None for i in range(len(spec.layers))]
    assert [layer.sliding_window for layer in spec.layers] == expected


@pytest.mark.parametrize("growth", ["", [], {}, False, "x", -0.1])
def test_a_growth_of_queries_of_a_wrong_type_or_sign_is_refused(growth):
    config = TINY["ministral3"]["config"]
    parameters = {**config["rope_parameters"], "llama_4_scaling_beta": growth}
    with pytest.raises(ModelError, match="llama_4_scaling_beta"):
        FAMILIES["ministral3"].read(Config(PATH, {**config, "rope_parameters": parameters}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", {}, "is {}, not a list of modules"),
        ("modules.json", [], r"is \[\], not a list of modules"),
        ("modules.json", ["x"], r"\[0\]: 'x': expected a module with texts type and path"),
        ("modules.json", [{"type": 5, "path": ""}], r"\[0\]: type = 5: expected a module"),
        ("modules.json", [{"type": "a.Transformer", "path": None}], r"\[0\]: path = None: expected a module"),
        ("config_sentence_transformers.json", {"prompts": []}, r"prompts is \[\], not texts by name"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token is 5, not a token"),
        ("tokenizer_config.json", {"mask_token": {}}, "mask_token is {}, not a token"),
        ("tokenizer_config.json", {"additional_special_tokens": 2}, "additional_special_tokens is 2, not tokens"),
        ("tokenizer_config.json", {"extra_special_tokens": ""}, "extra_special_tokens is '', not tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, r"added_tokens_decoder is \[\], not tokens by id"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token is 'yes', not of type bool"),
        ("tokenizer_config.json", {"do_lower_case": 1}, "do_lower_case is 1, not of type bool"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "model_max_length is 'x', not of type float"),
        ("config.json", {**TINY["llama3"]["config"], "architectures": [1]}, "architectures is .*, not a list of names"),
    ],
)  # fmt: skip
def test_a_file_of_a_directory_with_a_wrong_value_is_refused(tmp_path, name, content, message):
    tiny = TINY["llama3"]
    folder = write_model(tmp_path, tiny["config"], random_tensors(tiny["shapes"]))
    load_model(folder)
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=f"{name}: {message}"):
        load_model(folder)


@pytest.mark.parametrize("name", [name for name, tiny in TINY.items() if "kv_lora_rank" in tiny["config"]])
def test_key_heads_unlike_the_heads_of_latent_attention_are_refused(name):
    config, family = TINY[name]["config"], FAMILIES[TINY[name]["config"]["model_type"]]
    heads = config["num_attention_heads"]
    family.read(Config(PATH, {**config, "num_key_value_heads": heads}))
    for wrong in (1, 2 * heads):
        with pytest.raises(ModelError, match=f"num_key_value_heads = {wrong} is not supported"):
            family.read(Config(PATH, {**config, "num_key_value_heads": wrong}))
