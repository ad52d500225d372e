"""Random adapters, and weights that contain their changes."""

from pathlib import Path

import numpy as np

from foreword.models.lora import LoraAdapter, LoraPair
from foreword.models.spec import weight_names
from kernels.kernel_reference import float_tensor

LINEAR = (
    *("q", "k", "v", "attn_gate", "o", "q_a", "kv_a", "k_b", "v_b", "z", "dt", "beta", "dt_low", "gate", "up", "down"),
    *("router", "shared_gate", "latent_in", "latent_out", "per_layer_in", "per_layer_gate", "per_layer_out"),
    *("index_q", "index_k", "index_weights"),
)
"""The ends of the names of all linear layers that adapters change, but for those of blocks."""


def random_adapter(spec, rank, seed, names=LINEAR):
    rng = np.random.default_rng(seed)
    pairs = {}
    for name, shape in weight_names(spec):
        if name.rpartition(".")[2] in names and not name.startswith("blocks."):
            a = rng.normal(0, 1 / np.sqrt(shape[1]), (rank, shape[1]))
            b = rng.normal(0, 0.5 / np.sqrt(rank), (shape[0], rank))
            pairs[name] = LoraPair(float_tensor(a), float_tensor(b), 1.5)
    return LoraAdapter(Path(str(seed)), pairs)


def merged(weights, adapter):
    out = dict(weights)
    for name, pair in adapter.pairs.items():
        change = pair.b.dequantize().astype(np.float64) @ pair.a.dequantize() * pair.scale
        out[name] = float_tensor(weights[name].dequantize() + change)
    return out
