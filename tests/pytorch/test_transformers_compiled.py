"""Models of transformers through torch.compile: the same tokens. Takes a minute of a compiler."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")

import numpy as np

from foreword import LLM, PoolingParams, SamplingParams
from pytorch.compiling import compiles
from pytorch.test_transformers import saved


@compiles
def test_a_compiled_model_gives_the_same_tokens_and_embeddings(tmp_path):
    folder = saved(tmp_path, transformers.GPTNeoXConfig, num_attention_heads=2, intermediate_size=32)
    prompts = [list(range(5, 25)), [7, 8, 9]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    options = {"dtype": "fp32", "num_threads": 1, "max_num_batched_tokens": 16, "block_size": 4}
    tokens, vectors = [], []
    for compiled in (False, True):
        with LLM(str(folder), executor="transformers", compile=compiled, **options) as llm:
            outputs = llm.generate(prompts, params, progress=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            vectors.append([output.data for output in llm.embed(prompts, PoolingParams(), progress=False)])
    assert tokens[0] == tokens[1]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)
