"""Quantised weights of any bytes, in every number format, in a forward pass of each executor.

The first byte of an input chooses the format; the others are the weights.
"""

import math
from types import SimpleNamespace

import numpy as np

from foreword.models.quants import Quant
from foreword.models.spec import DecoderSpec, LayerSpec, RopeSpec, weight_names
from foreword.models.weights import Tensor, float_tensor
from fuzz.mutations import mutate_bytes
from fuzz.target import Target
from models.running import EXECUTORS, all_logits, whole

QUANTS = list(Quant)
SPEC = DecoderSpec(
    architecture="llama",
    vocab_size=32,
    hidden_size=256,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_model_len=64,
    layers=(LayerSpec(RopeSpec(tuple(100.0 ** -(np.arange(32) / 32)))),),
    norm_eps=1e-6,
    query_scale=0.125,
)


def valid():
    rng = np.random.default_rng(0)
    return [bytes([i]) + rng.bytes(quant.row_bytes(1 << 16)) for i, quant in enumerate(QUANTS)]


def mutate(rng, data):
    """Change bytes, sometimes to a run of one byte, which makes scales that are infinite, not a number, zero or
    denormal.
    """
    if rng.random() < 0.5:
        start, value = rng.randrange(1, len(data)), rng.choice((0x00, 0x01, 0x7C, 0x7F, 0x80, 0xFC, 0xFF))
        length = rng.choice((2, 200, 100_000))
        data = (data[:start] + bytes([value]) * length + data[start + length :])[: len(data)]
    return data[:1] + mutate_bytes(rng, data[1:])


def read(data, folder):
    quant = QUANTS[data[0] % len(QUANTS)]
    stored = np.frombuffer(data, np.uint8, offset=1)
    weights = {}
    for name, shape in weight_names(SPEC):
        if len(shape) == 1:
            weights[name] = float_tensor(np.ones(shape, np.float32))
        else:
            size = math.prod(shape[:-1]) * quant.row_bytes(shape[-1])
            weights[name] = Tensor(np.resize(stored, size).reshape(math.prod(shape[:-1]), -1), quant, shape)
    for executor in EXECUTORS:
        all_logits(SimpleNamespace(spec=SPEC, weights=weights), [[1, 2, 3]], whole([[1, 2, 3]]), executor)


TARGET = Target(valid, read, mutate)
