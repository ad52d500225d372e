"""Tiny random models as directories: a configuration, weights drawn from a seed, and a vocabulary of characters."""

import json
import re
import struct

import numpy as np

NORMS = (
    *("norm.weight", ".norm_1.weight", ".norm_2.weight", "transformer.norm_f.weight"),
    *("LayerNorm.weight", "emb_ln.weight", "attn_ln.weight", "mlp_ln.weight"),
    *("hidden_states_scale", "residual_scale", "router_states_scale", "qk_norm.temp"),
)
"""The ends of the names of weights that vary around one."""
OF_LAYERS = re.compile(r"encoder\.layers\.\d+\.norm[12]\.weight$")
"""The names of more of them."""


def random_tensors(shapes, seed=0):
    """{name: float32 array} for {name: shape}, equal for equal seeds. Those of `NORMS` vary around one."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name in sorted(shapes):
        is_norm = name.endswith(NORMS) or OF_LAYERS.search(name) is not None
        scale = 0.4 if "embed" in name or is_norm or name.endswith("bias") else 1 / np.sqrt([1, *shapes[name]][-1])
        tensors[name] = np.asarray(rng.standard_normal(shapes[name]) * scale, "<f4")
        if is_norm:
            tensors[name] += 1
        if name.endswith(("put_min", "put_max")):  # bounds of a product, on both sides of 0
            tensors[name] = np.asarray((0.2 + np.abs(tensors[name])) * (1 if name.endswith("max") else -1), "<f4")
        if name.endswith("gate.balancing_biases"):  # transformers makes the last one −1 in each model that it loads
            tensors[name] *= 0.4
            tensors[name] -= 1
            tensors[name][-1] = -1
    return tensors


DTYPES = {
    "<f4": "F32",
    "<f2": "F16",
    "<u2": "BF16",
    "<i4": "I32",
    "<u4": "U32",
    "|u1": "F8_E4M3",
    "|i1": "U8",
    "|S1": "I8",
    "<i8": "I64",
    "|V1": "F8_E8M0",
}


def write_safetensors(path, tensors):
    """Arrays of these types by name; those of uint16 are the bits of BF16, of uint8 the bits of FP8, of int8 the
    bits of uint8, of bytes those of int8, of void those of exponents.
    """
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": DTYPES[array.dtype.str],
            "shape": array.shape,
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values()))


def write_model(folder, config, tensors):
    """config.json, model.safetensors and tokenizer.json in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    vocabulary = {chr(0x100 + i): i for i in range(config["vocab_size"])}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
