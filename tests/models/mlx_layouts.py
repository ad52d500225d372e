"""The tensors that mlx_lm makes of those of a checkpoint, by the rules of its models; mlx.json has what it made."""

import re

import numpy as np

W = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
OF_EXPERTS = {**dict.fromkeys(("mixtral", "phimoe", "minimax_m2", "lfm2_moe"), W),
              "nemotron_h": {"up_proj": "fc1", "down_proj": "fc2"}}  # fmt: skip
"""The names of the matrices of experts, by the type of a model; others keep theirs."""
HOLDERS = {"dots1": "experts", "afmoe": "experts"}
RENAMED = {
    "bailing_moe": {".mlp.gate.": ".mlp.gate.gate_proj."},
    "exaone_moe": {".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"},
    "laguna": {".mlp.gate.weight": ".mlp.gate.proj.weight", ".mlp.experts.e_score": ".mlp.gate.e_score"},
    "gpt_neox": {"gpt_neox.layers.": "model.h.", "gpt_neox.": "model.", "embed_out.": "model.embed_out."},
    "gptj": {"transformer.": "model."},
    "gpt2": {"transformer.": "model."},
    "lfm2_moe": {f".{w}.": f".{own}." for w, own in W.items()},
}
PLUS_ONE = re.compile(r".*(input_layernorm|post_attention_layernorm|model\.norm|[qk]_norm)\.weight")


def as_mlx_has(tensors, config):
    """The tensors of a checkpoint, {name: array}, as mlx_lm writes them: experts of a layer in one tensor, fused
    matrices apart, convolutions turned, norms of some models plus one, weights of some multiplied.
    """
    kind, joined, out = config["model_type"].removesuffix("_text"), {}, {}
    for name, value in tensors.items():
        for own, part in changed(name, value, kind, config):
            if found := re.fullmatch(r"(.*)\.experts\.(\d+)\.([^.]*)(.*)", own) if kind != "dbrx" else None:
                matrix = OF_EXPERTS.get(kind, {}).get(found[3], found[3])
                stacked = f"{found[1]}.{HOLDERS.get(kind, 'switch_mlp')}.{matrix}{found[4]}"
                joined.setdefault(stacked, {})[int(found[2])] = part
                continue
            for old, new in RENAMED.get(kind, {}).items():
                if old in own:
                    own = own.replace(old, new)
                    break
            out[f"language_model.{own}" if kind in ("qwen3_5", "qwen3_5_moe", "llama4") else own] = part
    prefix = "language_model." if kind in ("qwen3_5", "qwen3_5_moe", "llama4") else ""
    stacks = {prefix + name: np.stack([parts[e] for e in sorted(parts)]) for name, parts in joined.items()}
    return {name: np.ascontiguousarray(value) for name, value in {**out, **stacks}.items()}


def changed(name, value, kind, config):
    """Yield the tensors of a tensor: (name, array)."""
    path = name.removesuffix(".weight")
    if kind.startswith(("qwen3_5", "qwen3_next")):
        if "mtp." in name:
            return
        value = value + np.float32(1) if PLUS_ONE.fullmatch(name) else value
    if kind == "falcon_h1":
        value = value * multiplier(path, config)
    if path.endswith(("conv1d", ".conv.conv")):
        value = value.swapaxes(1, 2)
    if kind == "gpt2" and path.endswith(("c_attn", "c_proj", "c_fc")) and value.ndim == 2:
        value = value.T
    if path.endswith("kv_b_proj") and kind in ("deepseek_v3", "glm4_moe_lite"):
        sizes = config["qk_nope_head_dim"], config["v_head_dim"]
        heads = value.reshape(config["num_attention_heads"], sum(sizes), -1)
        yield path.replace("kv_b_proj", "embed_q.weight"), heads[:, : sizes[0]].swapaxes(1, 2)
        yield path.replace("kv_b_proj", "unembed_out.weight"), heads[:, sizes[0] :]
    elif path.endswith(".block_sparse_moe.input_linear"):
        yield from pairs(path.replace("input_linear", "switch_mlp."), np.split(value, 2, axis=1))
    elif path.endswith(".block_sparse_moe.output_linear"):
        yield path.replace("output_linear", "switch_mlp.down_proj.weight"), value
    elif ".shared_mlp." in path and kind == "granitemoehybrid" and not config["num_local_experts"]:
        path = path.replace(".shared_mlp.", ".mlp.")
        if path.endswith("input_linear"):
            yield from pairs(path.replace("input_linear", ""), np.split(value, 2))
        else:
            yield path.replace("output_linear", "down_proj.weight"), value
    elif path.endswith(".experts.gate_up_proj") and kind == "gemma4":
        yield from pairs(path.replace("gate_up_proj", "switch_glu."), np.split(value, 2, axis=1))
    elif path.endswith(".experts.down_proj") and kind == "gemma4":
        yield path.replace("down_proj", "switch_glu.down_proj.weight"), value
    elif path.endswith(".experts.gate_up_proj") and kind == "llama4":
        yield from pairs(path.replace("gate_up_proj", ""), [x.swapaxes(1, 2) for x in np.split(value, 2, axis=2)])
    elif path.endswith(".experts.down_proj") and kind == "llama4":
        yield path + ".weight", value.swapaxes(1, 2)
    elif ".experts.mlp." in path and kind == "dbrx":
        for e, part in enumerate(np.split(value, config["ffn_config"]["moe_num_experts"])):
            yield path.replace("experts.mlp", f"experts.{e}") + ".weight", part.T if path.endswith("w2") else part
    else:
        yield name, value


def pairs(path, parts):
    return zip((f"{path}gate_proj.weight", f"{path}up_proj.weight"), parts, strict=True)


def multiplier(path, config):
    """The factor by which a weight of Falcon-H1 is multiplied, for each row or for all."""
    layer = path.rsplit(".", 1)[-1]
    if layer == "in_proj":
        inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, groups, groups, config["mamba_n_heads"])
        of_rows = np.concatenate([np.full(n, x) for n, x in zip(sizes, config["ssm_multipliers"], strict=True)])
        return (of_rows * config["ssm_in_multiplier"]).astype(np.float32)[:, None]
    into = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": into,
        "k_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
    }
    return np.float32(factors.get(layer, 1))
