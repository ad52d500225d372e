"""A model of transformers takes at most a fifth more memory than its weights and the KV cache."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")

from models.tiny import write_model

SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
PROGRAM = """
import resource, sys
import foreword.executors.transformers.model
from foreword import LLM, SamplingParams

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
llm = LLM(sys.argv[1], executor="transformers", max_num_seqs=32, max_model_len=256, num_threads=1)
prompts = [list(range(5 + i, 205 + i)) for i in range(4)] + [[5 + i, 6, 7] for i in range(28)]
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
llm.generate(prompts, params, progress=False)
cache = llm.engine.executor.cache
pool = sum(keys.nbytes + values.nbytes for keys, values in zip(cache.keys, cache.values))
print((peak() - before) / (llm.model.weight_bytes + pool))
"""


def test_memory_is_bounded_by_weights_and_cache(tmp_path):
    """The largest resident size while the model is loaded and 32 requests run, less that of the imports."""
    config = transformers.LlamaConfig(**SMOLLM2)
    write_model(tmp_path, config.to_dict(), {})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    del model
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert float(done.stdout) < 1.2, done.stdout
