"""Decode and prompt rates of the device executor on a GPU, beside the limits that memory and arithmetic set."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreword import LLM, SamplingParams
from foreword.engine import Engine
from foreword.errors import ConfigError

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, head size, vocabulary, tied
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49152, True),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 128, 151936, True),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
}
"""Shapes of models whose weights are random: rates do not depend on their values."""


@dataclass(frozen=True, slots=True)
class GpuResult:
    """work: "decode" or "prompt". tok_s: tokens computed per second. limit: tok_s at the memory's and the arithmetic's
    measured rates. step_ms: of a step. idle: fraction of the time in which the GPU ran no kernel.
    """

    shape: str
    kv_format: str
    work: str
    rows: int
    context: int
    step_ms: float
    tok_s: float
    limit: float
    idle: float


def write_model(folder: Path, shape: str) -> Path:
    """Write a directory of a Llama with random bfloat16 weights, and a tokenizer of bytes."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, layers, heads, kv_heads, dim, vocab, tied = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": dim,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 1 << 15, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "bos_token_id": None, "eos_token_id": 0, "tie_word_embeddings": tied,
        "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows * dim, hidden)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, heads * dim)
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{prefix}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {
        name: (torch.ones(size) if len(size) == 1 else torch.randn(size, device=device) / size[1] ** 0.5)
        .to(torch.bfloat16)
        .cpu()
        for name, size in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    names = [chr(0x100 + byte) for byte in range(256)]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": []},
    }  # fmt: skip
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", {})):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def limits() -> tuple[float, float]:
    """Return bytes read per second of a large read, and operations per second of a large bfloat16 product."""
    import torch
    from triton.testing import do_bench

    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    copied = 2 * x.numel() / do_bench(lambda: y.copy_(x), return_mode="median") * 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return copied, 2 * 8192**3 / do_bench(lambda: a @ b, return_mode="median") * 1e3


def run(
    shape: str, *, rows: list[int], contexts: list[int], steps: int, kv_format: str = "auto"
) -> Iterator[GpuResult]:
    """Measure decode steps of ``rows`` requests at ``contexts`` tokens each, and a prompt of each length."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("gpu: torch finds no GPU; run it on a machine that has one")
    hidden, inner, layers, heads, kv_heads, dim, vocab, _ = SHAPES[shape]
    in_layers = layers * (hidden * (2 * heads + 2 * kv_heads) * dim + 3 * hidden * inner)
    weights = in_layers + hidden * vocab
    kv_bytes = 2 * layers * kv_heads * (dim + 4 if kv_format == "fp8" else 2 * dim)
    bytes_s, ops_s = limits()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / shape, shape)
        with LLM(
            str(model), executor="device", dtype="bf16", kv_format=kv_format, max_num_seqs=max(rows),
            max_num_batched_tokens=8192, max_model_len=max(contexts) + 2 * steps + 64, prefix_caching=False,
        ) as llm:  # fmt: skip
            rng = np.random.default_rng(0)
            engine = llm.engine
            for context in contexts:
                for R in rows:
                    if R * (context + steps) > engine.cache.pool.num_blocks * engine.config.block_size:
                        continue
                    params = SamplingParams(temperature=0, max_tokens=2 * steps + 40, ignore_eos=True)
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    for i in range(R):
                        engine.add_request(str(i), rng.integers(1, vocab, context).tolist(), params, stream=True)
                    done: set[str] = set()
                    while len(done) < R:
                        done |= {output.request_id for output in engine.step()}
                    torch.cuda.synchronize()
                    seconds = time.perf_counter() - start
                    ops = 2 * in_layers * context + 2 * layers * heads * dim * context**2
                    yield GpuResult(
                        shape, kv_format, "prompt", R, context, seconds * 1e3, R * context / seconds,
                        context * ops_s / ops, float("nan"),
                    )  # fmt: skip
                    for _ in range(8):
                        engine.step()
                    times = []
                    for _ in range(steps):
                        start = time.perf_counter()
                        engine.step()
                        times.append(time.perf_counter() - start)
                    median = float(np.median(times))
                    idle = _idle(engine, 12)
                    moved = 2 * weights + R * kv_bytes * (context + steps)
                    limit = R / max(moved / bytes_s, 2 * weights * R / ops_s)
                    yield GpuResult(shape, kv_format, "decode", R, context, median * 1e3, R / median, limit, idle)
                    for i in range(R):
                        engine.abort(str(i))


def _idle(engine: Engine, steps: int) -> float:
    """Return the fraction of the time of some steps in which no kernel ran."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in trace.events())
    busy, end = 0.0, 0.0
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return 1 - busy / (end - spans[0][0]) if spans else float("nan")
