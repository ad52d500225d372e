"""Rates of every family with native execution, beside a Llama whose steps read as many bytes of weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from foreword.arrays import U8
from foreword.batch import InputBatch, InputBuffers, prepare_inputs
from foreword.bench.shapes import Shape
from foreword.executors.native import NativeExecutor, weight_bytes
from foreword.executors.pool import batch_groups
from foreword.models.config import Config
from foreword.models.families import FAMILIES
from foreword.models.quants import Quant
from foreword.models.spec import DecoderSpec, weight_names
from foreword.models.weights import Tensor, Weights, float_tensor
from parts.family_shapes import COMMON, SHAPES

Files = Literal["auto", "bf16", "int8"]
FORMATS: tuple[Files, ...] = ("auto", "bf16", "int8")
"""Weight formats: auto of files in Q4_0 (experts of gpt-oss in MXFP4), the others of files in bfloat16."""
BLOCK_SIZE = 16
WORKS = {"decode 1": Shape(1, 1, 128), "decode 8": Shape(8, 1, 128), "prefill": Shape(1, 512, 0)}
_POOL = 1_048_573  # random values, which tensors repeat: their number is prime, so that rows differ
_PER_KIND = 32  # values of a block of Q4_0 and MXFP4


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """The steps of one work. ms, llama_ms: of the fastest step. tok_s: computed tokens per second.

    megabytes, llama_megabytes: what a step has to read and write, see `step_bytes`. ratio: its rate beside the Llama's,
    as if both had as much to do: bytes per second of decode steps, and operations per second of a prompt.
    """

    family: str
    weight_format: str
    work: str
    ms: float
    llama_ms: float
    megabytes: float
    llama_megabytes: float
    tok_s: float
    ratio: float


def read_spec(family: str, **changes: Any) -> DecoderSpec:
    """Return the spec of a row of `SHAPES`."""
    model_type, keys = SHAPES[family]
    values = {**COMMON, **keys, **changes, "model_type": model_type}
    return FAMILIES[model_type].read(Config(Path(f"the {family} of benchmarks/parts/family_shapes.py"), values))


def llama_like(spec: DecoderSpec) -> DecoderSpec:
    """Return a Llama that reads as many weights as ``spec`` in a step of one token. Its MLP has the size for it."""
    base = read_spec("Llama", hidden_size=spec.hidden_size, vocab_size=spec.vocab_size)
    missing = weights_read(spec, 1) - weights_read(base, 1)
    columns = base.intermediate_size + missing / (3 * base.num_layers * base.hidden_size)
    return replace(base, intermediate_size=max(64, round(columns / 64) * 64))


def _times_read(spec: DecoderSpec, name: str, tokens: int) -> float:
    """Return the expected number of times that a step of this many tokens reads a weight: once per layer that has it;
    below once for an expert, of which each is as likely as the others.
    """
    if name.startswith("blocks."):
        block = int(name.split(".")[1])
        return sum(layer.aside is not None and layer.aside.block == block for layer in spec.layers)
    if ".experts." not in name:
        return 1.0
    moe = spec.layers[int(name.split(".")[1])].moe
    assert moe is not None
    return 1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens


def _matrices(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the matrices that steps multiply by."""
    for name, shape in weight_names(spec):
        if len(shape) > 1 and name != "per_layer_embed" and (name != "embed" or spec.tie_embeddings):
            yield name, shape


def weights_read(spec: DecoderSpec, tokens: int) -> float:
    """Return the number of weights that a step of this many tokens reads."""
    return sum(_times_read(spec, name, tokens) * prod(shape) for name, shape in _matrices(spec))


def step_bytes(spec: DecoderSpec, weights: Weights, weight_format: Files, shape: Shape) -> float:
    """Return the bytes that a step has to read and write: weights, of experts those that its tokens choose; keys and
    values in bfloat16; states, once in each direction.
    """
    moved = sum(
        _times_read(spec, name, shape.num_tokens) * weight_bytes(spec, name, weights[name], weight_format)
        for name, _ in _matrices(spec)
    )
    for layer in spec.layers:
        if layer.recurrent is not None:
            moved += shape.num_reqs * 2 * 4 * layer.recurrent.state_size
        elif layer.has_mixer:
            heads = spec.heads_of(layer)
            size = heads.head_dim + (0 if spec.mla else heads.value_dim)
            seen, indexer = shape.num_context_tokens, spec.indexer
            if indexer is not None:
                moved += 0 if layer.takes_chosen else 2 * indexer.head_dim * seen
                seen = min(seen, indexer.topk * shape.num_reqs)
            moved += 2 * heads.num_kv_heads * size * seen
    return moved


def operations(spec: DecoderSpec, shape: Shape) -> float:
    """Return the multiply-adds of a prompt: of weights, of queries with the keys and values they see, of those of an
    indexer that has a choice, and of each token that writes and reads a state.
    """
    count = weights_read(spec, 1) * shape.num_tokens
    for layer in spec.layers:
        if layer.recurrent is not None:
            count += 2 * layer.recurrent.num_values * layer.recurrent.key_dim * shape.num_tokens
        elif layer.has_mixer:
            most = layer.sliding_window
            if (indexer := spec.indexer) is not None:
                most = indexer.topk
                scored = sum(i + 1 for i in range(most, shape.num_new))
                count += 0 if layer.takes_chosen else indexer.num_heads * indexer.head_dim * scored
            seen = sum(min(i + 1, most or i + 1) for i in range(shape.num_new))
            heads = spec.heads_of(layer)
            count += heads.num_heads * (heads.head_dim + heads.value_dim) * seen
    return count


def random_weights(spec: DecoderSpec, weight_format: Files, seed: int = 0) -> dict[str, Tensor]:
    """Return weights whose products have values around one."""
    rng = np.random.default_rng(seed)
    floats = rng.standard_normal(_POOL, dtype=np.float32)
    bf16 = (floats.view(np.uint32) >> 16).astype(np.uint16)
    nibbles = rng.integers(0, 256, (_POOL // 16, 16), dtype=np.uint8)
    made = {}
    for name, shape in weight_names(spec):
        scale = shape[-1] ** -0.5
        is_small = len(shape) < 2 or shape[-1] % _PER_KIND or (weight_format == "auto" and min(shape) < _PER_KIND)
        if is_small or name.endswith("streams_router"):
            values = np.resize(floats, shape) * np.float32(0.1)
            made[name] = float_tensor(values + 1 if name.endswith("norm") else values)
        elif weight_format == "auto":
            is_fp4 = spec.architecture == "gpt_oss" and ".experts." in name
            quant = Quant.MXFP4 if is_fp4 else Quant.Q4_0
            head = [np.uint8(127 + round(np.log2(scale)))] if is_fp4 else _half(scale / 4)
            made[name] = Tensor(_blocks(nibbles, head, shape), quant, shape)
        else:
            smaller = np.uint16(-round(np.log2(scale)) << 7)
            values = (np.resize(bf16, (prod(shape[:-1]), shape[-1])) - smaller).astype("<u2", copy=False)
            made[name] = Tensor(values.view(np.uint8), Quant.BF16, shape)
    return made


def _half(scale: float) -> list[np.uint8]:
    return list(np.array([scale], "<f2").view(np.uint8))


def _blocks(nibbles: U8, head: Sequence[np.uint8], shape: tuple[int, ...]) -> U8:
    """Return the bytes of blocks of 32 numbers: the head, then 16 bytes."""
    count = prod(shape) // _PER_KIND
    blocks = np.empty((count, len(head) + 16), np.uint8)
    blocks[:, : len(head)] = head
    blocks[:, len(head) :] = np.resize(nibbles, (count, 16))
    return blocks.reshape(prod(shape[:-1]), -1)


class Steps:
    """A model and a batch of each work."""

    def __init__(self, spec: DecoderSpec, weight_format: Files, num_threads: int | None) -> None:
        self.spec, self.format = spec, weight_format
        self.weights = random_weights(spec, weight_format)
        groups = batch_groups(spec, BLOCK_SIZE)
        self.executor = NativeExecutor(
            spec, self.weights, num_blocks=max(s.num_blocks(groups) for s in WORKS.values()), block_size=BLOCK_SIZE,
            num_states=max(s.num_reqs for s in WORKS.values()) if spec.state_size else 0,
            weight_format=weight_format, num_threads=num_threads,
        )  # fmt: skip
        self.executor.zero_blocks(np.arange(self.executor.num_blocks, dtype=np.int32))
        self.batches: Mapping[str, InputBatch] = {name: self._batch(shape) for name, shape in WORKS.items()}

    def _batch(self, shape: Shape) -> InputBatch:
        groups = batch_groups(self.spec, BLOCK_SIZE)
        states, plan = shape.admit(
            vocab_size=self.spec.vocab_size,
            max_model_len=shape.length,
            kv_groups=groups,
            first_state=self.executor.num_blocks if self.executor.num_states else 1,
        )
        return prepare_inputs(
            states, plan, InputBuffers.for_states(states, shape.num_tokens), gather_block_tables=False
        )

    def seconds(self, work: str) -> float:
        """Return the time of a step; with one thread that of the processor, which other programs disturb least."""
        batch = self.batches[work]
        clock = time.process_time if self.executor.num_threads == 1 else time.perf_counter
        start = clock()
        self.executor.compute(batch, batch.logits_indices)
        return clock() - start

    def megabytes(self, work: str) -> float:
        return step_bytes(self.spec, self.weights, self.format, WORKS[work]) / 1e6

    def task(self, work: str) -> float:
        """Return the size of what the step has to do: operations of a prompt, else bytes."""
        shape = WORKS[work]
        return operations(self.spec, shape) if shape.num_new > 1 else self.megabytes(work)


def run(
    families: Sequence[str], formats: Sequence[Files], *, num_threads: int | None = None, repeats: int = 15
) -> Iterator[FamilyResult]:
    """Measure steps of each family and of its Llama in turns, and a fifth as many prompts."""
    for family, weight_format in product(families, formats):
        spec = read_spec(family)
        ours, llama = (Steps(one, weight_format, num_threads) for one in (spec, llama_like(spec)))
        for work, shape in WORKS.items():
            turns = 1 + (repeats if shape.num_new == 1 else max(1, repeats // 5))
            times = [(ours.seconds(work), llama.seconds(work)) for _ in range(turns)]
            fastest, fastest_llama = (min(seconds) for seconds in zip(*times[1:], strict=True))
            yield FamilyResult(
                family, weight_format, work, 1e3 * fastest, 1e3 * fastest_llama, ours.megabytes(work),
                llama.megabytes(work), shape.num_tokens / fastest,
                ours.task(work) / fastest / (llama.task(work) / fastest_llama),
            )  # fmt: skip
