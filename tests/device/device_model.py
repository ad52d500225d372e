"""A decoder over the rows on a device: torch's products between the kernels of keys and attention."""

import numpy as np
import torch
from device_place import WHERE, to_device
from torch.nn.functional import silu

from foreword.device.attention import DeviceAttention, LayerCache
from foreword.models.spec import DecoderSpec


class TorchDecoder:
    """Norms, rotated queries and keys with norms, a gated MLP; one KV group, float32."""

    hidden_size = mrope_dims = 0
    adapters = None

    def __init__(self, spec: DecoderSpec, weights, *, num_blocks: int, block_size: int) -> None:
        self.spec = spec
        self.weights = {name: to_device(np.array(t.dequantize())) for name, t in weights.items()}
        shape = (len(spec.layers), num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.keys, self.values = torch.zeros(shape, device=WHERE), torch.zeros(shape, device=WHERE)
        at = np.arange(spec.max_model_len, dtype=np.float32)[:, None]
        angles = [to_device(at * np.array(layer.rope.inv_freq, np.float32)) for layer in spec.layers]
        self.rotations = [(angle.cos(), angle.sin()) for angle in angles]
        self.attention: DeviceAttention | None = None

    def forward(self, rows, num_tokens, num_reqs, num_logits, inputs):
        spec, w, T = self.spec, self.weights, num_tokens
        if self.attention is None:
            self.attention = DeviceAttention(rows, heads=spec.num_heads, kv_heads=spec.num_kv_heads, dim=spec.head_dim)
        x = w["embed"][rows.tensors["input_ids"][:T].long()]
        for i, rotation in enumerate(self.rotations):
            p = f"layers.{i}."
            qkv = self.norm(x, p + "attn_norm") @ torch.cat([w[p + name] for name in "qkv"]).T
            queries = torch.zeros(T, spec.num_heads, spec.head_dim, device=WHERE)
            out = torch.zeros_like(queries)
            cache = LayerCache(self.keys[i], self.values[i])
            self.attention.write(
                qkv, queries, cache, num_tokens=T, rope=rotation, eps=spec.norm_eps,
                norms=(w[p + "q_norm"], w[p + "k_norm"]),
            )  # fmt: skip
            self.attention.attend(queries, cache, out, num_tokens=T, num_reqs=num_reqs, scale=spec.query_scale)
            x = x + out.flatten(1) @ w[p + "o"].T
            h = self.norm(x, p + "mlp_norm")
            x = x + (silu(h @ w[p + "gate"].T) * (h @ w[p + "up"].T)) @ w[p + "down"].T
        x = self.norm(x, "final_norm")[rows.tensors["logits_indices"][:num_logits]]
        return x @ w["lm_head"].T

    def norm(self, x, name):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.spec.norm_eps) * self.weights[name]

    def copy_blocks(self, sources, destinations):
        for cache in (self.keys, self.values):
            cache[:, destinations] = cache[:, sources].clone()
