"""Time of sampling a decode step by set of parameters, beside the model's own time and the same in PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foreword.arrays import F32
from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, SamplingParams, prepare_inputs
from foreword.batch.features.sampling import step_needs
from foreword.bench.shapes import Shape
from foreword.errors import ModelError
from foreword.executors.native import NativeExecutor
from foreword.executors.pool import batch_groups
from foreword.models.loader import load_model
from foreword.native import available
from foreword.sampling import Processors, Sampler

try:
    import torch
except ImportError:
    torch = None

NUM_REQS, PROMPT_LEN, OUTPUT_LEN, BLOCK_SIZE = 256, 192, 64, 16
VOCAB_SIZES = (49_152, 262_144)
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3}
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "typical-p 0.95": {"typical_p": 0.95},
    "top-n-sigma 1": {"top_n_sigma": 1.0},
    "XTC": {"xtc_probability": 0.5},
    "penalties": {"temperature": 0.0, **PENALTIES},
    "DRY": {"temperature": 0.0, "dry_multiplier": 0.8},
    "bias": {"temperature": 0.0, "logit_bias": dict.fromkeys(range(100), 1.0)},
    "bad words": {"temperature": 0.0, "bad_words_token_ids": [[i, i + 1] for i in range(20)]},
    "5 log-probabilities": {"temperature": 0.0, "logprobs": 5},
    "all of these": {
        "top_k": 50, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.95, "xtc_probability": 0.5, "dry_multiplier": 0.8,
        "logprobs": 5, "logit_bias": {3: 1.0}, **PENALTIES,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingResult:
    """Median time of sampling one decode step of ``num_reqs`` requests, and its share of the model's time for the step
    (None without the model). torch_ms: the same with PyTorch's operators, as transformers' processors use them (None
    without torch, or for parameters that have no such processor).
    """

    kind: str = field(default="sampling", init=False)
    vocab_size: int
    num_reqs: int
    parameters: str
    ms: float
    share: float | None
    torch_ms: float | None

    def __str__(self) -> str:
        share = "" if self.share is None else f"{100 * self.share:>9.1f} %"
        beside = "" if self.torch_ms is None else f"{self.torch_ms:>12.1f}"
        return f"{self.vocab_size:>8}  {self.parameters:<20}{self.ms:>9.2f}{share:>11}{beside:>12}"


def run(*, model: str = "smollm2", num_threads: int | None = None, repeats: int = 5) -> Iterator[SamplingResult]:
    """Measure every set of parameters at each size of vocabulary, all with the threads of one model."""
    executor, step_ms = _executor(model, num_threads)
    random = np.random.default_rng(0)
    for vocab_size in VOCAB_SIZES:
        logits = _logits(random, vocab_size)
        for name, given in PARAMETERS.items():
            ms = _measure(executor, logits, SamplingParams(seed=1, **given), repeats)
            yield SamplingResult(
                vocab_size,
                NUM_REQS,
                name,
                ms,
                None if step_ms is None else ms / step_ms,
                _torch_ms(logits, given, num_threads, repeats),
            )


def _executor(model: str, num_threads: int | None) -> tuple[NativeExecutor | None, float | None]:
    """Return the model and its time of a decode step in ms; neither without native code, or if it cannot be loaded."""
    if not available():
        return None, None
    try:
        loaded = load_model(model)
    except ModelError:
        return None, None
    shape = Shape(NUM_REQS, 1, 64)
    groups = batch_groups(loaded.decoder, BLOCK_SIZE)
    executor = NativeExecutor(
        loaded.decoder,
        loaded.weights,
        num_blocks=shape.num_blocks(groups),
        block_size=BLOCK_SIZE,
        num_threads=num_threads,
    )
    states, plan = shape.admit(vocab_size=loaded.decoder.vocab_size, max_model_len=shape.length, kv_groups=groups)
    batch = prepare_inputs(states, plan, InputBuffers.for_states(states, shape.num_tokens), gather_block_tables=False)
    return executor, _median_ms(lambda: executor.compute(batch, batch.logits_indices), 3)


def _logits(random: np.random.Generator, vocab_size: int) -> F32:
    """Rows whose probabilities fall with the rank as a language model's do, in random order."""
    falling = (-1.6 * np.log(np.arange(vocab_size) + 2.0)).astype(np.float32)
    logits = np.empty((NUM_REQS, vocab_size), np.float32)
    for row in logits:
        row[:] = falling[random.permutation(vocab_size)]
    return logits


def _measure(executor: NativeExecutor | None, logits: F32, params: SamplingParams, repeats: int) -> float:
    """Steps that are committed, as an engine runs them; only the sampling is timed."""
    vocab_size, random = logits.shape[1], np.random.default_rng(1)
    length = PROMPT_LEN + OUTPUT_LEN
    states = RequestStates(
        max_num_reqs=NUM_REQS,
        max_model_len=length + repeats + 2,
        vocab_size=vocab_size,
        kv_groups=[KVGroup(length + repeats + 2)],
    )
    for i in range(NUM_REQS):
        tokens = (vocab_size * random.random(length) ** 4).astype(np.int32)
        states.add_request(NewRequest(str(i), tokens[:PROMPT_LEN], [[i + 1]], tokens[PROMPT_LEN:], length - 1, params))
    buffers, processors = InputBuffers.for_states(states, NUM_REQS), Processors(states)
    sampler = Sampler(threads=executor.core if executor is not None else None)
    plan = np.arange(NUM_REQS, dtype=np.int32), np.ones(NUM_REQS, np.int32)
    times = []
    for _ in range(1 + repeats):
        batch = prepare_inputs(states, plan, buffers)
        start = time.perf_counter()
        sampled = sampler.sample(batch, logits, processors.step(step_needs(batch)))
        times.append(time.perf_counter() - start)
        states.commit(batch, sampled.token_ids)
    return 1e3 * float(np.median(times[1:]))


def _torch_ms(logits: F32, given: dict[str, Any], num_threads: int | None, repeats: int) -> float | None:
    """Measure the same on PyTorch tensors: one pass of operators over the whole batch, with the counts already made."""
    known = {"temperature", "top_k", "top_p", "min_p", "typical_p", "logprobs", "logit_bias", *PENALTIES}
    if torch is None or not given.keys() <= known:
        return None
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    z, random = torch.from_numpy(logits), np.random.default_rng(1)
    seen = (z.shape[1] * random.random((len(logits), PROMPT_LEN + OUTPUT_LEN)) ** 4).astype(np.int64)
    ids = torch.from_numpy(seen)
    return _median_ms(lambda: _torch_step(z, ids, given), repeats)


def _torch_step(logits: Any, seen: Any, given: dict[str, Any]) -> Any:
    z, p = logits, given
    if p.get("logit_bias"):
        z = z.clone()
        z[:, list(p["logit_bias"])] += torch.tensor(list(p["logit_bias"].values()))
    if "repetition_penalty" in p:
        score = torch.gather(z, 1, seen)
        score = torch.where(score < 0, score * p["repetition_penalty"], score / p["repetition_penalty"])
        z = z.scatter(1, seen, score)
        counts = torch.zeros_like(z).scatter_add_(1, seen[:, PROMPT_LEN:], torch.ones_like(z[:, :OUTPUT_LEN]))
        z = z - p["frequency_penalty"] * counts - p["presence_penalty"] * (counts > 0)
    chosen = z.argmax(1) if p.get("temperature") == 0 else _torch_draw(z, p)
    if "logprobs" in p:
        log_p = torch.log_softmax(logits, 1)
        rank = (log_p > log_p.gather(1, chosen[:, None])).sum(1)
        return chosen, log_p.topk(p["logprobs"], 1), rank
    return chosen


def _torch_draw(z: Any, p: dict[str, Any]) -> Any:
    if "top_k" in p:
        z = z.masked_fill(z < z.topk(p["top_k"], 1).values[:, -1:], -torch.inf)
    if "top_p" in p:
        ordered, order = z.sort(1)
        drop = ordered.softmax(1).cumsum(1) <= 1 - p["top_p"]
        z = z.masked_fill(drop.scatter(1, order, drop), -torch.inf)
    if "min_p" in p:
        share = z.softmax(1)
        z = z.masked_fill(share < p["min_p"] * share.amax(1, keepdim=True), -torch.inf)
    if "typical_p" in p:
        log_p = torch.log_softmax(z, 1)
        entropy = -(log_p.exp() * log_p).nansum(1, keepdim=True)
        _, order = (-log_p - entropy).abs().sort(1)
        ordered = z.gather(1, order).softmax(1).cumsum(1)
        drop = ordered - z.gather(1, order).softmax(1) >= p["typical_p"]
        z = z.masked_fill(drop.scatter(1, order, drop), -torch.inf)
    return torch.multinomial(z.softmax(1), 1)[:, 0]


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))
