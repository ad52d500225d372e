"""A model divided among processes has the tokens of one process, applies adapters, and ends as a whole."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")

from foreword.batch import SamplingParams
from foreword.engine.observer import EngineMetrics
from foreword.errors import ConfigError, EngineError
from foreword.executors.torch import parallel
from foreword.executors.torch.executor import TorchExecutor
from foreword.executors.torch.options import device_of_rank
from foreword.executors.torch.parallel import ParallelExecutor
from foreword.executors.torch.ranks import Ranks
from foreword.executors.torch.shard import Shards, backends_of
from kernels.kernel_adapters import random_adapter
from kernels.kernel_reference import SPECS, random_weights, tiny_spec
from kernels.kernel_traffic import BLOCK_SIZE, engine, requests

OPTIONS = {"num_blocks": 400, "block_size": BLOCK_SIZE, "dtype": "fp32", "num_threads": 1}


def tokens_of(executor, spec, *, num_blocks=400, counts=None, **config):
    own = engine(executor, spec, num_blocks=num_blocks, **config)
    own.observers.add(counts or EngineMetrics())
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
        (2, SPECS["wide_values"]),
        (2, SPECS["centred_heads"]),
        (2, SPECS["late_experts"]),
        (2, SPECS["aside"]),
        (2, SPECS["mixed_qkv"]),
        (3, tiny_spec(num_heads=9, num_kv_heads=3, tie_embeddings=True, vocab_size=100)),
    ],
)
def test_ranks_give_the_tokens_of_one(size, spec):
    weights = random_weights(spec)
    parallel = ParallelExecutor(spec, weights, tensor_parallel_size=size, **OPTIONS)
    assert tokens_of(parallel, spec) == tokens_of(TorchExecutor(spec, weights, **OPTIONS), spec)
    assert tokens_of(parallel, spec)  # a second engine on the same ranks


DENSE = tiny_spec(num_heads=4, num_kv_heads=2)


@pytest.mark.parametrize(
    ("by_head", "by_position", "spec"),
    [(2, 1, DENSE), (1, 2, DENSE), (2, 2, DENSE), (2, 1, SPECS["moe"]), (2, 1, SPECS["aside"])],
)
def test_ranks_apply_adapters_as_one_does(by_head, by_position, spec):
    weights, adapters = random_weights(spec), [random_adapter(spec, rank, rank) for rank in (3, 8)]
    prompts = np.random.default_rng(1).integers(0, spec.vocab_size, (6, 20)).tolist()
    sizes = {"tensor_parallel_size": by_head, "context_parallel_size": by_position}

    def tokens(executor, **config):
        own, got = engine(executor, spec, num_blocks=400, **config), {}
        for i, prompt in enumerate(prompts):
            if i < len(adapters):
                own.load_lora(f"a{i}", adapters[i])
            lora = [None, "a0", "a1"][i % 3] if i else "a0"
            own.add_request(str(i), prompt, SamplingParams(max_tokens=12, temperature=0), lora=lora)
            own.step()
        own.drop_lora("a1")
        while own.has_work:
            got.update((out.request_id, out.outputs[0].token_ids) for out in own.step() if out.finished)
        return got

    parallel = ParallelExecutor(spec, weights, **sizes, **OPTIONS)
    got = tokens(parallel, num_context_ranks=by_position)
    assert got == tokens(TorchExecutor(spec, weights, **OPTIONS))
    parallel.close()


@pytest.mark.parametrize(
    ("by_head", "by_position", "spec", "few_blocks"),
    [
        (1, 2, SPECS["gemma"], 16),
        (1, 2, SPECS["gated_delta"], 12),
        (1, 3, tiny_spec(num_heads=4, num_kv_heads=1), 8),
        (2, 2, SPECS["gemma"], 16),
        (2, 2, SPECS["moe"], 16),
    ],
)
def test_ranks_that_share_positions_give_the_tokens_of_one(by_head, by_position, spec, few_blocks):
    """Under chunks of 24 tokens, prefix hits, and a pool so small that requests are preempted."""
    weights, settings = random_weights(spec), {"max_num_batched_tokens": 24}
    sizes = {"tensor_parallel_size": by_head, "context_parallel_size": by_position}
    parallel = ParallelExecutor(spec, weights, **sizes, **OPTIONS)
    alone = tokens_of(TorchExecutor(spec, weights, **OPTIONS), spec)
    counts = EngineMetrics()
    settings |= {"num_context_ranks": by_position, "counts": counts}
    assert tokens_of(parallel, spec, **settings) == alone
    assert tokens_of(parallel, spec, num_blocks=few_blocks, async_scheduling=True, **settings) == alone
    assert counts.num_preemptions > 0
    assert counts.num_cached_tokens > 0


def test_a_killed_rank_ends_every_step_and_the_other_ranks(monkeypatch):
    aborted = []  # exchanges on GPUs do not end by themselves
    monkeypatch.setattr(Shards, "abort", lambda self: aborted.append(self))
    spec = tiny_spec(num_heads=3, num_kv_heads=3)
    executor = ParallelExecutor(spec, random_weights(spec), tensor_parallel_size=3, **OPTIONS)
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
    assert second.wait(60) is not None
    assert [shards for shards in aborted if shards is executor.shards] == [executor.shards]  # others may end, too
    own.close()


def test_close_ends_the_ranks_at_once():
    spec = tiny_spec(num_heads=2, num_kv_heads=2)
    executor = ParallelExecutor(spec, random_weights(spec), tensor_parallel_size=2, **OPTIONS)
    executor.close()
    assert executor._ranks._processes[0].poll() is not None
    executor.close()
    own = engine(executor, spec, num_blocks=400)
    own.add_request("a", [1, 2, 3])
    with pytest.raises(EngineError, match="make a new LLM"):
        own.step()


def test_an_interrupt_of_a_step_ends_the_ranks(monkeypatch):
    spec = tiny_spec(num_heads=2, num_kv_heads=2)
    executor = ParallelExecutor(spec, random_weights(spec), context_parallel_size=2, **OPTIONS)

    def interrupt(*_):
        raise KeyboardInterrupt

    own = engine(executor, spec, num_blocks=400, num_context_ranks=2)
    own.add_request("a", [1, 2, 3])
    monkeypatch.setattr(executor, "own_logits", interrupt)
    with pytest.raises(KeyboardInterrupt):
        own.step()
    assert executor._ranks._processes[0].poll() is not None


def listening(pid: int) -> set[str]:
    """The hexadecimal addresses at which a process accepts connections over TCP."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists() or link.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].rpartition(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_is_open_to_the_network_and_nothing_that_they_met_by_is_left(monkeypatch):
    met = []
    connect = Shards.connect

    def connected(self, path, device):
        met.append((Path(path).parent, stat.S_IMODE(Path(path).parent.stat().st_mode)))
        connect(self, path, device)

    monkeypatch.setattr(Shards, "connect", connected)
    before = listening(os.getpid())
    spec = tiny_spec(num_heads=3, num_kv_heads=3)
    executor = ParallelExecutor(spec, random_weights(spec), tensor_parallel_size=3, **OPTIONS)
    pids = [os.getpid(), *(process.pid for process in executor._ranks._processes)]
    ipv4_loopback = "0100007F"
    assert set().union(*map(listening, pids)) - before <= {ipv4_loopback}
    ((folder, mode),) = met
    assert mode == 0o700
    assert not folder.exists()
    own = engine(executor, spec, num_blocks=400)
    own.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2))
    while own.has_work:
        own.step()
    own.close()


def with_a_stopped_rank(timeout: float):
    """An engine with a request, whose first further rank is stopped, and that rank's process. timeout: seconds that the
    next steps wait for it.
    """
    spec = tiny_spec(num_heads=3, num_kv_heads=3)
    executor = ParallelExecutor(spec, random_weights(spec), tensor_parallel_size=3, rank_timeout=600, **OPTIONS)
    own = engine(executor, spec, num_blocks=400)
    own.add_request("a", [1, 2, 3], SamplingParams(max_tokens=50))
    own.step()
    process = executor._ranks._processes[0]
    process.send_signal(signal.SIGSTOP)
    executor.shards.all._timeout = timeout
    return own, process


def test_a_rank_that_hangs_ends_the_step_after_the_limit():
    own, process = with_a_stopped_rank(3)
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"did not answer within 3 s \(rank_timeout\); make a new LLM"):
        own.step()
    assert time.monotonic() - start < 300
    assert process.poll() is not None
    own.close()


def test_an_interrupt_is_seen_while_a_rank_hangs():
    own, process = with_a_stopped_rank(600)
    timer = threading.Timer(1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        own.step()
    assert time.monotonic() - start < 300
    assert process.poll() is not None
    timer.join()
    own.close()


def test_an_error_in_the_constructor_ends_the_ranks(monkeypatch):
    spec, made = tiny_spec(num_heads=2, num_kv_heads=2), []

    def start(*arguments):
        made.append(Ranks(*arguments))
        return made[0]

    monkeypatch.setattr(parallel, "Ranks", start)
    with pytest.raises(MemoryError, match="KV pool"):
        ParallelExecutor(spec, random_weights(spec), tensor_parallel_size=2, **{**OPTIONS, "num_blocks": 2**31})
    assert made[0]._processes[0].poll() is not None


def test_sizes_that_do_not_divide_the_heads_are_refused():
    spec = tiny_spec(num_heads=12, num_kv_heads=6)
    with pytest.raises(ConfigError, match="use one of 1, 2, 3, 6"):
        ParallelExecutor(spec, random_weights(spec), tensor_parallel_size=4, **OPTIONS)
    with pytest.raises(ConfigError, match="context_parallel_size=0: must be at least 1"):
        ParallelExecutor(spec, random_weights(spec), tensor_parallel_size=2, context_parallel_size=0, **OPTIONS)


def test_each_rank_has_a_device_of_its_own():
    assert [device_of_rank("cuda", rank, 3, 4) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert device_of_rank("cpu", 1, 2, 0) == "cpu"
    assert backends_of(torch.device("cpu")) == {"cpu": "gloo"}
    assert backends_of(torch.device("cuda:1")) == {"cpu": "gloo", "cuda": "nccl"}


def test_devices_that_ranks_cannot_have_are_refused():
    size, spec = torch.cuda.device_count() + 2, tiny_spec()
    for device, message in (
        ("cuda", f"need {size} CUDA devices, PyTorch finds {size - 2}"),
        ("cuda:0", "each on a device of its own; choose these with CUDA_VISIBLE_DEVICES"),
    ):
        with pytest.raises(ConfigError, match=message):
            ParallelExecutor(spec, random_weights(spec), context_parallel_size=size, device=device, **OPTIONS)
