"""Serve random traffic with a vLLM on the CPU whose steps are checked, and print what was found as JSON.

python checking.py SCENARIO [--fault NAME] [--requests N] [--seed N] [--second] [--ahead] [--plain-worker] [--as-is]
    [--without-top] [--greedy]
--second: the second model runner, with the functions of `foreword.vllm`. --ahead: its asynchronous scheduler.
--as-is: without `repair_drafts`. --without-top: no request has top_k or top_p. --greedy: all have temperature 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIVE = "live"
"""The property of a test that served a scenario: (scenario, steps, tensors, findings, preemptions, seconds)."""

VOCABULARY = 1000
TINY = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip
LLAMA = TINY | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GEMMA = TINY | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 64,
}  # fmt: skip
QWEN = TINY | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4,
    "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
SHORT_BLOCKS = QWEN | {"head_dim": 256, "linear_num_key_heads": 1, "linear_num_value_heads": 1}
"""A block's keys of a layer are as large as a state, so its blocks have 64 tokens, and prompts pass their borders."""
VISION_START, IMAGE, VISION_END, VIDEO = range(VOCABULARY - 4, VOCABULARY)
QWEN_VL = TINY | {
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_act": "silu",
    "vision_start_token_id": VISION_START, "image_token_id": IMAGE, "vision_end_token_id": VISION_END,
    "video_token_id": VIDEO, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
    "vision_config": {
        "depth": 1, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "model_type": "qwen2_vl",
    },
}  # fmt: skip
NGRAM = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    },
}  # fmt: skip
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (LLAMA, {}),
    "drafts": (LLAMA, NGRAM),
    "adapters": (LLAMA, LORA),
    "embeddings": (LLAMA, {"enable_prompt_embeds": True}),
    "pooling": (LLAMA, {"runner": "pooling"}),
    "grammars": (LLAMA, {"skip_tokenizer_init": False}),
    "grammars-drafts": (LLAMA, NGRAM | {"skip_tokenizer_init": False}),
    "images": (QWEN_VL, {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2, "video": 0}}),
    "windows": (GEMMA, {}),
    "windows-drafts": (GEMMA, NGRAM),
    "states": (QWEN, {"enable_prefix_caching": False, "dtype": "bfloat16"}),
    "states-at-borders": (SHORT_BLOCKS, {"enable_prefix_caching": True, "dtype": "bfloat16"}),
}
OPTIONS = {
    "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 96, "block_size": 32,
    "disable_log_stats": True, "num_gpu_blocks_override": 30, "enable_prefix_caching": True,
    "skip_tokenizer_init": True, "dtype": "float32", "load_format": "dummy", "seed": 0,
}  # fmt: skip


def engine(model: dict[str, Any], options: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(model))
    if not options.get("skip_tokenizer_init", True):
        write_tokenizer(directory)
    return LLMEngine.from_engine_args(EngineArgs(str(directory), **OPTIONS | options))


def enlarge_weights(model: Any) -> None:
    """Make random weights so large that the tokens depend on recurrent states."""
    for name, weights in model.named_parameters():
        if weights.dim() > 1:
            weights.data.mul_(150)
        elif name.endswith("linear_attn.norm.weight"):
            weights.data.fill_(3)


def write_tokenizer(directory: Path) -> None:
    """A token per word "t3 ", and per letter of the alphabet; with those of images, and how images become patches."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i} ": i for i in range(VOCABULARY)}
    special = dict(
        zip(("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"), range(VISION_START, VOCABULARY),
            strict=True)
    ) | {"</s>": 2}  # fmt: skip
    letters = {letter: 10 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    replaced = {i: word for word, i in (letters | special).items()}
    tokenizer = Tokenizer(WordLevel({replaced.get(i, word): i for word, i in words.items()}, unk_token="t0 "))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=[w for w in special if w != "</s>"]
    )  # fmt: skip
    fast.save_pretrained(directory)
    patches = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor", "patch_size": 14,
        "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(patches))


def adapters() -> list[Any]:
    """Two adapters with random weights."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    config = {
        "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_type": "LORA", "task_type": "CAUSAL_LM",
        "bias": "none",
    }  # fmt: skip
    requests = []
    for i in (1, 2):
        path = Path(tempfile.mkdtemp())
        (path / "adapter_config.json").write_text(json.dumps(config))
        weights = {
            f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": torch.randn(
                shape, dtype=torch.float32
            )
            for layer in range(2)
            for part, shape in (("A", (8, 128)), ("B", (128, 8)))
        }
        save_file(weights, path / "adapter_model.safetensors")
        requests.append(LoRARequest(f"adapter{i}", i, str(path)))
    return requests


class Traffic:
    """Random arrivals with shared prefixes and repeats, n > 1, penalties, seeds and aborts, until all are done."""

    def __init__(
        self, llm: Any, scenario: str, seed: int, requests: int, *, with_top: bool = True, hottest: float = 0.8
    ) -> None:
        self.llm, self.scenario, self.rng, self.requests = llm, scenario, random.Random(seed), requests
        self.with_top, self.hottest = with_top, hottest
        self.loras = adapters() if scenario == "adapters" else []
        self.shared = [self.tokens(n) for n in (31, 32, 64, 97)]
        self.alive: list[str] = []
        self.outputs: dict[str, list[list[int]]] = {}
        self.num_sent = 0

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCABULARY) for _ in range(count)]

    def prompt(self) -> dict[str, Any]:
        prompt = list(self.rng.choice([[], *self.shared]))
        tail = self.tokens(self.rng.choice((1, 2, 7, 30, 110, 200)))
        prompt += (tail[:4] * 50)[: len(tail)] if self.rng.random() < 0.5 else tail
        if self.scenario == "embeddings" and self.rng.random() < 0.5:
            import torch

            generator = torch.Generator().manual_seed(len(prompt))
            return {"prompt_embeds": torch.randn(len(prompt), 128, generator=generator, dtype=torch.float32)}
        if self.scenario == "images" and self.rng.random() < 0.7:
            return self.with_images(tail[:100])
        return {"prompt_token_ids": prompt[:400]}

    def with_images(self, tail: list[int]) -> dict[str, Any]:
        """A prompt of few shared parts around images, of which there are few too: their tokens are equal where the
        images have the same size, and their blocks are equal where the images are.
        """
        from PIL import Image

        images = []
        prompt = list(self.rng.choice(self.shared))
        for _ in range(self.rng.choice((1, 2))):
            size, shade = self.rng.choice(((56, 112), (112, 84))), self.rng.choice((10, 90))
            images.append(Image.new("RGB", size, (shade, shade, shade)))
            prompt += [VISION_START, IMAGE, VISION_END, *self.shared[1]]
        return {"prompt_token_ids": prompt + tail, "multi_modal_data": {"image": images}}

    def parameters(self) -> Any:
        from vllm import PoolingParams, SamplingParams

        rng = self.rng
        if self.scenario == "pooling":
            return PoolingParams(task="embed")
        hot = rng.choice((0.0, self.hottest))
        more: dict[str, Any] = {}
        if hot and self.with_top:
            more = rng.choice(({}, {"top_k": 20}, {"top_p": 0.9}, {"n": 2}, {"top_k": 5, "top_p": 0.8}))
        more |= rng.choice(({}, {}, {"frequency_penalty": 0.3}, {"repetition_penalty": 1.2, "presence_penalty": 0.1}))
        most = rng.choice((1, 5, 30, 60))
        if "grammars" in self.scenario and rng.random() < 0.6:
            more["structured_outputs"] = self.grammar()
        return SamplingParams(temperature=hot, max_tokens=most, ignore_eos=True, detokenize=False, **more)

    def grammar(self) -> Any:
        from vllm.sampling_params import StructuredOutputsParams

        return self.rng.choice((
            StructuredOutputsParams(regex="[a-f]{3,40}"),
            StructuredOutputsParams(regex="(ab|cd)*xyz"),
            StructuredOutputsParams(choice=["yes", "no", "perhaps"]),
        ))  # fmt: skip

    def send(self) -> None:
        name = f"r{self.num_sent}"
        lora = self.rng.choice([None, *self.loras])
        self.llm.add_request(name, self.prompt(), self.parameters(), lora_request=lora)
        self.alive.append(name)
        self.num_sent += 1

    def run(self) -> None:
        rng = self.rng
        while self.num_sent < self.requests or self.llm.has_unfinished_requests():
            if self.num_sent < self.requests and (rng.random() < 0.5 or not self.llm.has_unfinished_requests()):
                self.send()
            if self.alive and rng.random() < 0.02:
                name = self.alive.pop(rng.randrange(len(self.alive)))
                self.llm.abort_request([name])
            for output in self.llm.step():
                if output.finished:
                    if output.request_id in self.alive:
                        self.alive.remove(output.request_id)
                    completions = [] if self.scenario == "pooling" else output.outputs
                    self.outputs[output.request_id] = [list(completion.token_ids) for completion in completions]


def count_preemptions(scheduler: Any) -> list[int]:
    count, preempt = [0], scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    return count


def schedule_ahead() -> None:
    """Let a vLLM for the CPU use its asynchronous scheduler."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)


def repair_drafts() -> None:
    """Repair two faults of a vLLM for the CPU with drafts (docs/findings.md): each draft gets the temperature, top_k
    and top_p of its request, and a step without drafts may have a top_k.
    """
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    def expand(
        output: Any, values: Any, cu_num_tokens: Any, replaced: int, by: int, MAX_NUM_TOKENS: int | None = None
    ) -> None:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        output.copy_(values.masked_fill(values == replaced, by).repeat_interleave(counts))

    original = sampler.apply_top_k_only

    def apply_top_k_only(logits: Any, k: Any) -> Any:
        return original(logits, k) if len(logits) else logits

    cpu_triton_utils._expand_kernel_impl = expand
    sampler.apply_top_k_only = apply_top_k_only


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--fault", default="")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--second", action="store_true")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--plain-worker", action="store_true", help="vLLM's own worker, which a plugin may follow")
    parser.add_argument("--as-is", action="store_true", help="a vLLM whose faults with drafts are not repaired")
    parser.add_argument("--without-top", action="store_true")
    parser.add_argument("--greedy", action="store_true")
    options = parser.parse_args()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(options.second))
    import torch.cpu

    torch.cpu._is_amx_tile_supported = lambda: False  # virtual machines may offer it without permission
    model, more = SCENARIOS[options.scenario]
    if options.second:
        from foreword.vllm.registration import register

        register()
        if "speculative_config" in more:
            more = more | {"speculative_config": NGRAM["speculative_config"] | {"method": "ngram_gpu"}}
    if not options.as_is:
        repair_drafts()
    if options.ahead:
        schedule_ahead()
    worker_class = {} if options.plain_worker else {"worker_cls": "foreword.vllm.CheckedWorker"}
    llm = engine(model, more | worker_class)
    core = llm.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    runner = worker.model_runner
    if model is SHORT_BLOCKS:
        enlarge_weights(runner.model)
    preemptions = count_preemptions(core.scheduler)
    if options.fault:
        import faults

        getattr(faults, options.fault)(core.scheduler, runner)
    limits = {"with_top": not options.without_top, "hottest": 0.0 if options.greedy else 0.8}
    traffic = Traffic(llm, options.scenario, options.seed, options.requests, **limits)
    started, died = time.perf_counter(), ""
    try:
        traffic.run()
    except Exception as error:  # a fault may end vLLM itself
        died = f"{type(error).__name__}: {error}"[:500]
    seconds = time.perf_counter() - started
    result = {
        "outputs": traffic.outputs,
        "preemptions": preemptions[0],
        "seconds": seconds,
        "died": died,
        "runner": type(runner).__name__,
    }
    follower = getattr(runner, "follower", None)
    if follower is not None:
        result["text"] = llm.collective_rpc("foreword_report")[0]
        report = follower.shadow.report()
        result |= {
            "failure": follower.failure,
            "steps": report.num_steps,
            "compared": report.num_compared,
            "tensors": report.num_tensors,
            "microseconds": dict(report.microseconds),
            "findings": [[f.step, f.tensor, f.group, f.request, f.origin, str(f)] for f in report.findings],
            "num_findings": sum(report.counts.values()),
        }
    print("RESULT", json.dumps(result))
    sys.stdout.flush()
    if follower is not None:
        follower.close()
    os._exit(0)  # threads of vLLM would keep the process


if __name__ == "__main__":
    main()
