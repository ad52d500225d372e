"""Attention alone, beside the machine's memory rate and its arithmetic in the numbers of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import get_args

import numpy as np

from foreword.batch import InputBuffers, prepare_inputs
from foreword.bench.shapes import Shape
from foreword.executors.native import NativeExecutor
from foreword.executors.options import KVFormat
from foreword.executors.pool import batch_groups
from foreword.models.loader import load_model
from foreword.models.spec import DecoderSpec
from foreword.native import native
from parts.kernels import BLOCK_SIZE, Roofline, measure_roofline

KV_FORMATS: tuple[KVFormat, ...] = get_args(KVFormat)
PREFILL = 512  # tokens of a prompt's chunk


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """The stage of attention in a step of ``num_reqs`` × ``query_len`` tokens, ``context`` of them computed before.

    gb_s: bytes of keys and values per second, each counted once. gop_s: operations of the two products per second, a
    product and a sum counted as two. memory, arithmetic: the fractions of the machine's rates that these are;
    arithmetic in the numbers of the cache. num_layers: the layers of the model, fewer where memory does not hold all.
    """

    kind: str = field(default="attention", init=False)
    kv_format: KVFormat
    num_reqs: int
    query_len: int
    context: int
    num_layers: int
    ms: float
    gb_s: float
    gop_s: float
    memory: float
    arithmetic: float

    def __str__(self) -> str:
        return (
            f"{self.kv_format:<6}{self.num_reqs:>4} x {self.query_len:<4}over {self.context:<6}{self.ms:>9.2f} ms in "
            f"{self.num_layers:>2} layers: {self.gb_s:>6.1f} GB/s, {100 * self.memory:>3.0f} % of memory; "
            f"{self.gop_s:>6.0f} Gop/s, {100 * self.arithmetic:>3.0f} % of arithmetic"
        )


def run(
    *,
    model: str = "smollm2",
    num_threads: int | None = None,
    kv_formats: Sequence[KVFormat] = KV_FORMATS,
    rows: Sequence[int] = (8, 64, 256),
    contexts: Sequence[int] = (256, 1024, 8192),
    cache_bytes: int = 2 * 10**9,
    repeats: int = 7,
) -> Iterator[Roofline | AttentionResult]:
    """Print the roofline first, then the median of ``repeats`` steps of each format: ``rows`` decodes over each
    context, and a chunk of a prompt after it, compared with a roofline measured just before.

    cache_bytes: bounds the keys and values of a step; a single layer may have more.
    """
    yield measure_roofline(num_threads)
    loaded = load_model(model)
    shapes = [Shape(*decode) for decode in ((n, 1, context) for context, n in product(contexts, rows))]
    shapes += [Shape(1, PREFILL, context) for context in contexts]
    for kv_format, shape in product(kv_formats, shapes):
        num_layers = min(loaded.decoder.num_layers, max(1, cache_bytes // _bytes(loaded.decoder, 1, shape, kv_format)))
        spec = replace(
            loaded.decoder, layers=loaded.decoder.layers[:num_layers], max_model_len=max(shape.length, 16), longer=None
        )
        groups = batch_groups(spec, BLOCK_SIZE)
        executor = NativeExecutor(
            spec,
            loaded.weights,
            num_blocks=shape.num_blocks(groups),
            block_size=BLOCK_SIZE,
            kv_format=kv_format,
            num_threads=num_threads,
        )
        executor.zero_blocks(np.arange(shape.num_blocks(groups), dtype=np.int32))  # else all pages are the zero page
        states, plan = shape.admit(vocab_size=spec.vocab_size, max_model_len=shape.length, kv_groups=groups)
        batch = prepare_inputs(
            states, plan, InputBuffers.for_states(states, shape.num_tokens), gather_block_tables=False
        )
        roof, seconds = measure_roofline(num_threads), []
        for _ in range(repeats + 1):
            before = executor.core.stage_seconds()["attention"]
            executor.compute(batch, batch.logits_indices)
            seconds.append(executor.core.stage_seconds()["attention"] - before)
        yield _result(roof, spec, shape, kv_format, float(np.median(seconds[1:])))


def _bytes(spec: DecoderSpec, num_layers: int, shape: Shape, kv_format: KVFormat) -> int:
    """Return the bytes of keys and values that a step of the shape reads."""
    one = native.kv_bytes(
        kv_format, 1, BLOCK_SIZE, num_layers, spec.num_kv_heads, spec.head_dim, spec.own_heads.value_dim
    )
    return one * shape.num_context_tokens // BLOCK_SIZE


def _result(roof: Roofline, spec: DecoderSpec, shape: Shape, kv_format: KVFormat, seconds: float) -> AttentionResult:
    keys = shape.num_computed + (shape.num_new + 1) / 2  # that a query sees, on average
    operations = 4 * spec.num_layers * spec.num_heads * spec.head_dim * shape.num_tokens * keys
    gb_s = _bytes(spec, spec.num_layers, shape, kv_format) / seconds / 1e9
    gop_s = operations / seconds / 1e9
    return AttentionResult(
        kv_format=kv_format,
        num_reqs=shape.num_reqs,
        query_len=shape.num_new,
        context=shape.num_computed,
        num_layers=spec.num_layers,
        ms=1e3 * seconds,
        gb_s=gb_s,
        gop_s=gop_s,
        memory=gb_s / roof.memory_gb_s,
        arithmetic=gop_s / roof.arithmetic(kv_format),
    )
