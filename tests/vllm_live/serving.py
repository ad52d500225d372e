"""Serve prompts with vLLM on the CPU and print the sampled tokens as JSON: python serving.py KERNELS MODEL [--drafts].

KERNELS: "v1" for its first model runner; for the second one "functions" of `foreword.vllm`, which the installed
Foreword registers by its entry point, or "triton", vLLM's own kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 1000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}


def write_model(directory: Path) -> None:
    """Write a tiny Llama with random weights, whose logits spread."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    size = CONFIG["hidden_size"]
    shapes = {"model.embed_tokens": (VOCABULARY, size), "lm_head": (VOCABULARY, size)}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
            shapes[f"model.layers.{layer}.{name}"] = (size, size)
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            shapes[f"model.layers.{layer}.{name}"] = (size, size)
    weights = {
        f"{name}.weight": torch.randn(shape) * (1 if "embed" in name else 0.15) for name, shape in shapes.items()
    }
    norms = [f"model.layers.{i}.{n}_layernorm" for i in range(2) for n in ("input", "post_attention")]
    weights |= {f"{name}.weight": torch.ones(size) for name in (*norms, "model.norm")}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, directory / "model.safetensors")


def greedy_deficits(directory: Path, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[float]]:
    """Return by how much the logit of each output token is below the largest one, in float64 by transformers."""
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    own = {"architectures", "model_type", "torch_dtype"}
    model = LlamaForCausalLM(LlamaConfig(**{name: value for name, value in CONFIG.items() if name not in own})).double()
    model.load_state_dict({k: v.double() for k, v in load_file(directory / "model.safetensors").items()})
    deficits = []
    with torch.no_grad():
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
            of_output = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            deficits.append((logits.max(-1).values - of_output).tolist())
    return deficits


def interpret_kernels() -> None:
    """Give vLLM the real Triton, whose interpreter runs its kernels, before the modules of the kernels are imported."""
    import interpreted  # noqa: F401  (what the interpreter lacks)
    import triton
    import triton.language as tl
    import vllm.triton_utils as utils

    utils.triton, utils.tl, utils.HAS_TRITON = triton, tl, True
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.cpu import shm  # noqa: F401  (buffers of the CPU)

    topk_topp_sampler.HAS_TRITON = False  # top-k and top-p in PyTorch, as without Triton


def sampling(rng: random.Random, greedy: bool, drafts: bool) -> dict[str, Any]:
    """Return the parameters of a request. vLLM refuses min_p and logit_bias where drafts are verified."""
    parameters: dict[str, Any] = {"temperature": 0.0, "max_tokens": rng.choice([4, 8, 60])}
    if not greedy:
        parameters |= {"temperature": rng.choice([0.0, 0.7, 1.0, 1.5]), "seed": rng.randrange(2**62)}
        parameters |= rng.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}][: 3 if drafts else 4])
        parameters |= rng.choice([{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.4, "presence_penalty": 0.2}])
        biases = [{}, {"allowed_token_ids": list(range(40))}, {"logit_bias": {5: 3.0, 17: -2.0}}]
        parameters |= rng.choice(biases[: 2 if drafts else 3])
        parameters |= rng.choice(
            [{}, {"logprobs": 3}, {"stop_token_ids": [7, 8], "min_tokens": 4}, {"prompt_logprobs": 2}]
        )
    return parameters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", choices=["v1", "functions", "triton"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(options.kernels != "v1"))
    if options.kernels == "triton":
        interpret_kernels()
    from vllm import LLM, SamplingParams

    ngram = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    drafts = {"speculative_config": {"method": "ngram" if options.kernels == "v1" else "ngram_gpu", **ngram}}
    llm = LLM(
        str(options.model),
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=10,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        seed=0,
        **(drafts if options.drafts else {}),
    )
    rng = random.Random(1)
    prompts, parameters = [], []
    shared = [rng.randrange(3, VOCABULARY) for _ in range(40)]
    for _ in range(options.requests):
        tail = [rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 5, 33, 70]))]
        prompts.append({"prompt_token_ids": rng.choice([[], shared]) + tail * rng.choice([1, 2])})
        parameters.append(
            SamplingParams(ignore_eos=True, detokenize=False, **sampling(rng, options.greedy, options.drafts))
        )
    core = llm.llm_engine.engine_core.engine_core
    preempt, preempted = core.scheduler._preempt_request, []

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    core.scheduler._preempt_request = counted
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    runner = core.model_executor.driver_worker.worker.model_runner
    result = {"runner": type(runner).__module__, "tokens": [list(o.outputs[0].token_ids) for o in outputs]}
    result["prompts"] = [prompt["prompt_token_ids"] for prompt in prompts]
    result["preemptions"] = len(preempted)
    result["logprobs"] = [
        [[(t, lp.logprob, lp.rank) for t, lp in at.items()] for at in o.outputs[0].logprobs or []] for o in outputs
    ]
    result["prompt_logprobs"] = [
        [[(t, lp.logprob, lp.rank) for t, lp in (at or {}).items()] for at in o.prompt_logprobs or []] for o in outputs
    ]
    print("RESULT", json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # threads of vLLM would keep the process


if __name__ == "__main__":
    main()
