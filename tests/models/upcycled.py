"""SmolLM2 with experts in place of each MLP, all copies of it: equal to SmolLM2, whatever the router chooses.

Dense and upcycled model are GGUF files of the first layers, so that they are small and are loaded as any other.
"""

import numpy as np

from foreword.models.gguf import Strings, read_gguf
from foreword.models.quants import Quant
from models import gguf_writer

KINDS = {"f4": "f32", "i4": "i32", "u4": "u32", "i8": "i64", "u8": "u64", "f8": "f64"}


def with_kind(value):
    """A value of metadata with its type, as the writer takes it."""
    match value:
        case str():
            return "str", value
        case bool():
            return "bool", value
        case int():
            return "u32", value
        case float():
            return "f32", value
        case Strings():
            return "[str]", value
    return f"[{KINDS[value.dtype.str[1:]]}]", value.tolist()


def write(path, source, num_layers, num_experts=0, experts_per_token=0, seed=0):
    """The first layers of a llama in GGUF: dense, or with experts and a random router."""
    gguf, random = read_gguf(source), np.random.default_rng(seed)
    metadata = {key: with_kind(value) for key, value in gguf.metadata.items()}
    metadata["llama.block_count"] = "u32", num_layers
    dropped = tuple(f"blk.{i}." for i in range(num_layers, gguf.metadata["llama.block_count"]))
    tensors = {n: (t.quant, t.shape, t.data.ravel()) for n, t in gguf.tensors.items() if not n.startswith(dropped)}
    if num_experts:
        metadata["llama.expert_count"] = "u32", num_experts
        metadata["llama.expert_used_count"] = "u32", experts_per_token
        for i in range(num_layers):
            for part in ("gate", "up", "down"):
                quant, shape, data = tensors.pop(f"blk.{i}.ffn_{part}.weight")
                tensors[f"blk.{i}.ffn_{part}_exps.weight"] = quant, (num_experts, *shape), np.tile(data, num_experts)
            router = random.normal(0, 0.3, (num_experts, gguf.metadata["llama.embedding_length"]))
            tensors[f"blk.{i}.ffn_gate_inp.weight"] = Quant.F32, router.shape, gguf_writer.f32(router).ravel()
    return gguf_writer.write(path, metadata, tensors)
