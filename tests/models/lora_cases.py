"""Adapters whose logits PEFT has recorded (tests/data/models/make_lora.py)."""

from models.lora_files import LINEAR, as_parameters, random_expert_factors, random_factors, with_copies, write_peft
from models.recorded import TINY


def case(model, ends=LINEAR, rank=4, keep=lambda name: True, parameters=lambda factors: factors, **config):
    """parameters: what becomes of the factors of experts."""
    return {"model": model, "ends": ends, "rank": rank, "keep": keep, "parameters": parameters, "config": config}


ALONE = {"rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {r".*\.gate_up_proj": 16}}
"""The configuration of adapters whose gates and ups have ranks of their own in one parameter."""


CASES = {
    "llama": case("llama3"),
    "all-linear": case("qwen3", target_modules="all-linear"),
    "rank-stabilised": case("llama3", use_rslora=True),
    "rank 64": case("llama3", ("q_proj", "v_proj"), 64, r=64, lora_alpha=16),
    "rank and alpha patterns": case(
        "llama3",
        rank=lambda name: 2 if name.endswith("q_proj") else 7 if name.endswith("1.mlp.up_proj") else 4,
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 7},
        alpha_pattern={r"layers\.[02]\..*_proj": 5, "down_proj": 3},
    ),
    "a pattern of modules": case(
        "llama3",
        keep=lambda name: name.split(".")[2] in "13" and name.endswith(("k_proj", "v_proj")),
        target_modules=r"model\.layers\.[13]\..*(k|v)_proj",
    ),
    "some layers": case(
        "llama3", ("down_proj", "o_proj"), keep=lambda name: name.split(".")[2] in "03", layers_to_transform=[0, 3]
    ),
    "all but some modules": case(
        "llama3",
        keep=lambda name: not (name.endswith(("v_proj", "down_proj")) or name.split(".")[2] == "2"),
        target_modules="all-linear",
        exclude_modules=r".*\.(v_proj|down_proj)|model\.layers\.2\..*|lm_head",
    ),
    "all but listed modules": case(
        "llama3",
        keep=lambda name: not name.endswith(("self_attn.v_proj", "layers.1.mlp.down_proj")),
        exclude_modules=["v_proj", "layers.1.mlp.down_proj"],
        target_modules=[end for end in LINEAR if not end.startswith(("qkv", "gate_up"))],
    ),
    "fused": case("phi3"),
    "post norms": case("gemma2"),
    "biases": case("qwen2"),
    "no rotary layers": case("smollm3"),
    "attention of experts": case("mixtral"),
    "short convolutions": case("lfm2", ("",)),
    "delta-nets": case("qwen3_5", ("",)),
    "mamba 2": case("granite-hybrid-dense", ("",)),
    "mamba 1": case("jamba-dense", ("in_proj", "x_proj", "out_proj")),  # transformers reads the weight of dt_proj
    "latent attention": case("minicpm3", ("",)),
    "a shared expert": case(
        "qwen2-moe", ("q_proj", "shared_expert_gate", "up_proj", "down_proj"), keep=lambda name: ".experts." not in name
    ),
    "a linear layer of each expert": case("mixtral", ("q_proj", "w1", "w2", "w3")),
    "a parameter of all experts": case(
        "qwen3-moe",
        ("v_proj", "gate_proj", "up_proj", "down_proj"),
        keep=lambda name: ".1.mlp." not in name,
        parameters=lambda factors: as_parameters(factors, 6),
        **ALONE,
    ),
    "rows of gate and up in turns": case("gpt-oss"),
    "inputs taken for outputs": case("llama4", ("q_proj",)),
    "experts without a gate": case(
        "nemotron-h-moe",
        ("q_proj", ".up_proj", ".down_proj"),
        keep=lambda name: ".experts." in name or name.endswith("q_proj"),
        parameters=lambda factors: {
            name.replace("backbone", "model"): both for name, both in as_parameters(factors, 8).items()
        },
    ),
    "experts that do nothing": case(
        "longcat",
        ("o_proj", "gate_proj", "up_proj", "down_proj"),
        keep=lambda name: ".mlps." not in name,
        parameters=lambda factors: as_parameters(factors, 4, 3),
        **ALONE,
    ),
    "inputs of each layer": case("gemma4", ("",)),
    "blocks that layers share": case(
        "zamba2", ("",), parameters=lambda factors: with_copies(factors, -1), target_modules="all-linear"
    ),
    "layers that run several times": case("hrm-text", ("",), target_modules="all-linear"),
    "a head before the logits": case("modernbert-decoder", ("",), target_modules="all-linear"),
    "convolutions inside attention": case("zaya", ("",), target_modules="all-linear"),
    "hyper-connections": case("hy-v4", ("",), target_modules="all-linear"),
    "several streams": case("gemma3n", ("",), target_modules="all-linear"),
}


def write_case(folder, case):
    """The adapter as a PEFT directory."""
    shapes = TINY[case["model"]]["shapes"]
    factors = random_factors(shapes, case["rank"], ends=case["ends"])
    factors = case["parameters"]({name: both for name, both in factors.items() if case["keep"](name)})
    return write_peft(folder, factors | random_expert_factors(shapes), **case["config"])
