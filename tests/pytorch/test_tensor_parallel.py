"""Tensor parallelism in processes: the tokens of one rank, and ends of ranks."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")

from foreword.batch import SamplingParams
from foreword.errors import ConfigError, EngineError
from foreword.executors.torch.executor import TorchExecutor
from foreword.executors.torch.parallel import TensorParallelExecutor
from kernels.kernel_reference import SPECS, random_weights, tiny_spec
from kernels.kernel_traffic import BLOCK_SIZE, engine, requests

OPTIONS = {"num_blocks": 400, "block_size": BLOCK_SIZE, "dtype": "fp32", "num_threads": 1}


def tokens_of(executor, spec):
    own = engine(executor, spec, num_blocks=400)
    waiting, got = list(requests(np.random.default_rng(4), spec.vocab_size)), {}
    while waiting or own.has_work:
        if waiting:
            own.add_request(*waiting.pop(0))
        got.update((out.request_id, out.outputs[0].token_ids) for out in own.step() if out.finished)
    own.close()
    return got


@pytest.mark.parametrize(
    ("size", "spec"),
    [
        (2, SPECS["gemma"]),
        (2, SPECS["moe"]),
        (2, SPECS["odd_sizes"]),
        (2, SPECS["gated_delta"]),
        (3, tiny_spec(num_heads=9, num_kv_heads=3, tie_embeddings=True, vocab_size=100)),
    ],
)
def test_ranks_give_the_tokens_of_one(size, spec):
    weights = random_weights(spec)
    parallel = TensorParallelExecutor(spec, weights, tensor_parallel_size=size, **OPTIONS)
    assert tokens_of(parallel, spec) == tokens_of(TorchExecutor(spec, weights, **OPTIONS), spec)
    assert tokens_of(parallel, spec)  # a second engine on the same ranks


def test_a_killed_rank_ends_every_step_and_the_other_ranks():
    spec = tiny_spec(num_heads=3, num_kv_heads=3)
    executor = TensorParallelExecutor(spec, random_weights(spec), tensor_parallel_size=3, **OPTIONS)
    own = engine(executor, spec, num_blocks=400)
    own.add_request("a", [1, 2, 3], SamplingParams(max_tokens=50))
    own.step()
    first, second = executor._ranks._processes
    first.kill()
    first.wait()
    with pytest.raises(EngineError, match="rank 1 of the model was ended by SIGKILL"):
        own.step()
    with pytest.raises(EngineError, match="rank 1 of the model was ended by SIGKILL"):
        own.step()
    assert second.wait(10) is not None
    own.close()


def test_sizes_that_do_not_divide_the_heads_are_refused():
    spec = tiny_spec(num_heads=12, num_kv_heads=6)
    with pytest.raises(ConfigError, match="use one of 1, 2, 3, 6"):
        TensorParallelExecutor(spec, random_weights(spec), tensor_parallel_size=4, **OPTIONS)
    with pytest.raises(ConfigError, match="needs device='cpu'"):
        TensorParallelExecutor(spec, random_weights(spec), tensor_parallel_size=2, **OPTIONS, device="cuda")
