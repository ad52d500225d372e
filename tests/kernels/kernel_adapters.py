"""Random adapters, and weights that contain their changes."""

from pathlib import Path

import numpy as np

from foreword.models.lora import LoraAdapter, LoraPair
from foreword.models.spec import weight_names
from kernels.kernel_reference import float_tensor

LINEAR = (
    *("q", "k", "v", "attn_gate", "o", "q_a", "kv_a", "k_b", "v_b", "z", "dt", "beta", "dt_low", "gate", "up", "down"),
    *("router", "shared_gate", "latent_in", "latent_out", "per_layer_in", "per_layer_gate", "per_layer_out"),
    *("index_q", "index_k", "index_weights", "head_dense", "aside", "mlp_low", "gate_high", "up_high"),
    *(f"{name}_{part}" for name in ("q", "k", "v", "attn_norm", "mlp_norm") for part in ("low", "high")),
    *("late_v", "router_in", "router_first", "router_second"),
)
"""The ends of the names of all linear layers that adapters change."""


def random_adapter(spec, rank, seed, names=LINEAR):
    """Changes of layers aside are small: with larger ones, a rounded bit of an input changes 1e-4 of the logits."""
    rng, scale = np.random.default_rng(seed), 0.5 if any(layer.aside for layer in spec.layers) else 1.5
    pairs = {}
    for name, shape in weight_names(spec, by_layer=True):
        if name.rpartition(".")[2] in names:
            a = rng.normal(0, 1 / np.sqrt(shape[1]), (rank, shape[1]))
            b = rng.normal(0, 0.5 / np.sqrt(rank), (shape[0], rank))
            pairs[name] = LoraPair(float_tensor(a), float_tensor(b), scale)
    return LoraAdapter(Path(str(seed)), pairs)


def merged(weights, adapter):
    """The weights with their changes. That of a block is by the name of its layer, and alone."""
    out = dict(weights)
    for name, pair in adapter.pairs.items():
        change = pair.b.dequantize().astype(np.float64) @ pair.a.dequantize() * pair.scale
        out[name] = float_tensor(weights[name].dequantize() + change if name in weights else change)
    return out
