"""Adapters whose logits PEFT has recorded (tests/data/models/make_lora.py)."""

from models.lora_files import LINEAR, random_factors, write_peft
from models.recorded import TINY


def case(model, ends=LINEAR, rank=4, keep=lambda name: True, **config):
    return {"model": model, "ends": ends, "rank": rank, "keep": keep, "config": config}


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
    "a shared expert": case("qwen2-moe", ("q_proj", "shared_expert_gate", "up_proj", "down_proj")),
    "inputs of each layer": case("gemma4", ("",)),
}


def write_case(folder, case):
    """The adapter as a PEFT directory."""
    factors = random_factors(TINY[case["model"]]["shapes"], case["rank"], ends=case["ends"])
    return write_peft(folder, {name: both for name, both in factors.items() if case["keep"](name)}, **case["config"])
