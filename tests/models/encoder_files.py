"""Encoders of images of tiny models as GGUF files: the names and metadata of converters, written out by hand."""

import math
import re

import numpy as np

from foreword.models.quants import Quant
from models import gguf_writer

PROJECTORS = {
    "idefics3": {"connector.modality_projection.proj.weight": "mm.model.fc.weight"},
    "gemma3": {
        "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight": "mm.soft_emb_norm.weight",
    },
    "lfm2-vl": {
        f"multi_modal_projector.{module}.{kind}": f"mm.{own}.{kind}"
        for module, own in (("layer_norm", "input_norm"), ("linear_1", 1), ("linear_2", 2))
        for kind in ("weight", "bias")
    },
}
PROJECTORS["lfm2-vl-plain"] = PROJECTORS["lfm2-vl"]
BLOCK = {
    "layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out", "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
WHOLE = {
    "embeddings.patch_embedding": "v.patch_embd", "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln", "patch_embed.proj": "v.patch_embd", "pos_embed": "v.position_embd",
    "merger.ln_q": "v.post_ln", "merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2", "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2",
}  # fmt: skip
QWEN = {
    "qwen2-vl": "qwen2vl_merger", "qwen2.5-vl": "qwen2.5vl_merger", "qwen3-vl": "qwen3vl_merger",
    "qwen3-vl-moe": "qwen3vl_merger", "qwen3.5": "qwen3vl_merger",
}  # fmt: skip
LFM2 = ("lfm2-vl", "lfm2-vl-plain")
GEMMA4 = ("gemma4", "gemma4-large")
OF_GEMMA4 = {
    "input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.o_proj": "attn_out",
}  # fmt: skip
WHOLE_OF_GEMMA4 = {
    "vision_tower.patch_embedder.input_proj.weight": "v.patch_embd.weight",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias", "vision_tower.std_scale": "v.std_scale",
    "embed_vision.embedding_projection.weight": "mm.input_projection.weight",
}  # fmt: skip
FEATURES = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
FIRST_FEATURES = 0  # the only layer of the recorded models that has some


def qwen_tensors(name, tensors):
    """The tensors of an encoder of Qwen's: patches frame by frame, and before the third version q, k and v apart."""
    found = {}
    for key, value in tensors.items():
        stem, kind = key.removeprefix("model.").removeprefix("visual.").rsplit(".", 1)
        if "visual." not in key:
            continue
        if key.endswith("patch_embed.proj.weight"):
            found |= {"v.patch_embd.weight": value[:, :, 0], "v.patch_embd.weight.1": value[:, :, 1]}
        elif layer := re.fullmatch(r"blocks\.(\d+)\.(.+)", stem):
            found[f"v.blk.{layer[1]}.{BLOCK[layer[2]]}.{kind}"] = value
        elif feature := re.fullmatch(r"deepstack_merger_list\.0\.(.+)", stem):
            found[f"v.deepstack.{FIRST_FEATURES}.{FEATURES[feature[1]]}.{kind}"] = value
        else:
            found[f"{WHOLE[stem]}.{kind}"] = value
    if not name.startswith("qwen3"):
        for key in [key for key in found if ".attn_qkv." in key]:
            parts = zip("qkv", np.split(found.pop(key), 3), strict=True)
            found |= {key.replace("qkv", part): value for part, value in parts}
    return found


def gemma4_tensors(tensors):
    """The tensors of an encoder of Gemma 4: bounds have one dimension."""
    found = {}
    for key, value in tensors.items():
        own = key.removeprefix("model.")
        if own in WHOLE_OF_GEMMA4:
            found[WHOLE_OF_GEMMA4[own]] = value
        elif layer := re.fullmatch(r"vision_tower\.encoder\.layers\.(\d+)\.(.+?)(\.linear)?\.(\w+)", own):
            module = OF_GEMMA4.get(layer[2]) or BLOCK[layer[2]]
            found[f"v.blk.{layer[1]}.{module}.{layer[4]}"] = np.atleast_1d(value)
    return found


def encoder_tensors(name, tensors):
    """The tensors of an encoder by the names of llama.cpp's converter, which adds 1 to one norm."""
    if name in QWEN:
        return qwen_tensors(name, tensors)
    found = gemma4_tensors(tensors) if name in GEMMA4 else {}
    for key, value in tensors.items() if not found else ():
        own = re.sub(r"^(model\.)?(vision_tower|vision_model)\.(vision_model\.)?", "v/", key).removeprefix("model.")
        if own in PROJECTORS[name]:
            found[PROJECTORS[name][own]] = value + (1 if "soft_emb_norm" in own else 0)
        elif layer := re.fullmatch(r"v/encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", own):
            found[f"v.blk.{layer[1]}.{BLOCK[layer[2]]}.{layer[3]}"] = value
        elif (whole := re.fullmatch(r"v/(.+)\.(weight|bias)", own)) and whole[1] in WHOLE:
            found[f"{WHOLE[whole[1]]}.{whole[2]}"] = value
    patch = found["v.patch_embd.weight"]
    if patch.ndim == 2:  # rows of pixels
        side = math.isqrt(patch.shape[1] // 3)
        found["v.patch_embd.weight"] = np.ascontiguousarray(patch.reshape(-1, side, side, 3).transpose(0, 3, 1, 2))
    return found


def qwen_metadata(name, own):
    """The metadata that files of encoders of Qwen's have; the bounds of pixels are of newer files alone."""
    vision = {
        "image_size": 56, "patch_size": own["patch_size"], "block_count": own["depth"],
        "embedding_length": own.get("embed_dim", own["hidden_size"]), "attention.head_count": own["num_heads"],
        "feed_forward_length": own.get("intermediate_size", own["hidden_size"]), "projection_dim": 32,
        "image_min_pixels": 256, "image_max_pixels": 2048,
    }  # fmt: skip
    more = {"clip.vision.image_mean": ("[f32]", [0.48145466, 0.4578275, 0.40821073]),
            "clip.vision.image_std": ("[f32]", [0.26862954, 0.26130258, 0.27577711])}  # fmt: skip
    if name == "qwen2.5-vl":
        vision |= {"n_wa_pattern": own["fullatt_block_indexes"][0] + 1, "window_size": own["window_size"]}
        more["clip.use_silu"] = ("bool", True)
    elif name != "qwen2-vl":
        flags = [i in own.get("deepstack_visual_indexes", ()) for i in range(own["depth"])]
        vision["spatial_merge_size"] = own["spatial_merge_size"]
        more |= {"clip.use_gelu": ("bool", True), "clip.vision.is_deepstack_layers": ("[bool]", flags)}
    return vision, more


def encoder_metadata(name, own):
    """The metadata of the file of an encoder. own: its configuration."""
    if name in QWEN:
        projector, eps, (vision, more) = QWEN[name], 1e-6, qwen_metadata(name, own)
    else:
        projector = "lfm2" if name in LFM2 else "gemma4v" if name in GEMMA4 else name
        eps = own["rms_norm_eps" if name in GEMMA4 else "layer_norm_eps"]
        vision = {
            "image_size": own.get("image_size", 256), "patch_size": own["patch_size"],
            "embedding_length": own["hidden_size"],
            "feed_forward_length": own["intermediate_size"], "block_count": own["num_hidden_layers"],
            "attention.head_count": own["num_attention_heads"], "projection_dim": 32,
        }  # fmt: skip
        vision["projector.scale_factor"] = 1 if name == "gemma3" else 2
        vision |= {"projector.scale_factor": own["pooling_kernel_size"]} if name in GEMMA4 else {}
        vision |= {"preproc_image_size": 56} if name == "idefics3" else {}
        more = {f"clip.vision.image_{key}": ("[f32]", [0.5] * 3) for key in ("mean", "std")}
        if name in GEMMA4:
            more = {"clip.vision.image_mean": ("[f32]", [0.0] * 3), "clip.vision.image_std": ("[f32]", [1.0] * 3)}
        else:
            more["clip.use_gelu"] = ("bool", True)
        more |= {"clip.vision.image_resize_algo": ("str", "bilinear")} if name in LFM2 else {}
    return {
        "general.architecture": ("str", "clip"), "clip.has_vision_encoder": ("bool", True),
        "clip.projector_type": ("str", projector), "clip.vision.attention.layer_norm_epsilon": ("f32", eps),
        **{f"clip.vision.{key}": ("u32", value) for key, value in vision.items()}, **more,
    }  # fmt: skip


def write_encoder(path, name, record, tensors, more=()):
    """Write the encoder of a record. more: further metadata; None in place of a value: the file lacks it."""
    metadata = encoder_metadata(name, record["files"]["config.json"]["vision_config"]) | dict(more)
    arrays = {key: (Quant.F32, value.shape, gguf_writer.f32(value).ravel()) for key, value in tensors.items()}
    found = {key: value for key, value in metadata.items() if value is not None}
    return gguf_writer.write(path, found, arrays)
