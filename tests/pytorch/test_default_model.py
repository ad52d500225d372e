"""The default model on the torch executor: its tokens in half precision, and its memory."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")

from foreword import LLM, SamplingParams
from foreword.executors.torch.executor import TorchExecutor
from foreword.models.loader import load_model
from models import running
from models.running import all_logits, in_chunks

RECORDED = Path(__file__).parents[1] / "data" / "models" / "smollm2.json"
pytestmark = pytest.mark.model


@pytest.mark.parametrize(("dtype", "close_call"), [("bf16", 0.3), ("fp16", 0.05)])
def test_half_precision_chooses_the_tokens_of_transformers_in_float32(smollm2_path, monkeypatch, dtype, close_call):
    """close_call: between the two best logits, where either may win by rounding."""
    monkeypatch.setitem(running.EXECUTORS, "half", partial(TorchExecutor, dtype=dtype, num_threads=1))
    results = json.loads(RECORDED.read_text())["results"]
    texts = [result["prompt_ids"] + result["output_ids"][:-1] for result in results]
    every = all_logits(load_model(smollm2_path), texts, in_chunks(texts, [40, 1, 17]), "half")
    for result, logits in zip(results, every, strict=True):
        sure = np.array(result["top1_top2_logit_margin"]) > close_call
        chosen = logits[len(result["prompt_ids"]) - 1 :].argmax(-1)
        np.testing.assert_array_equal(chosen[sure], np.array(result["output_ids"])[sure])


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 3}, {"context_parallel_size": 2}])
def test_ranks_answer_as_one(sizes):
    prompts, params = ["The capital of France is", "One two three"], SamplingParams(temperature=0.0, max_tokens=8)
    options = {"executor": "torch", "dtype": "fp32", "num_threads": 1, "max_model_len": 64}
    with LLM("smollm2", **options) as one, LLM("smollm2", **options, **sizes) as several:
        wanted, got = one.generate(prompts, params), several.generate(prompts, params)
        assert [out.outputs[0].token_ids for out in got] == [out.outputs[0].token_ids for out in wanted]
    assert all(process.poll() is not None for process in several.engine.executor._ranks._processes)


def test_memory_is_bounded_by_weights_and_cache():
    """The largest resident size while the model is loaded and 32 requests run, less that of the imports."""
    program = """
import resource
import foreword.executors.torch.executor
from foreword import LLM, SamplingParams

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
llm = LLM("smollm2", executor="torch", max_num_seqs=32, max_model_len=256, num_threads=1)
llm.generate(["One two three"] * 32, SamplingParams(temperature=0.0, max_tokens=4))
executor = llm.engine.executor
decoder = executor.decoder
weights = decoder.embed.nbytes + sum(product.weight.nbytes for layer in decoder.layers for product in layer.products)
cache = sum(keys.nbytes + values.nbytes for keys, values in zip(executor.cache.keys, executor.cache.values))
print((peak() - before) / (weights + cache))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.2, done.stdout
