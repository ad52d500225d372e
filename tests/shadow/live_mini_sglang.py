"""mini-sglang's own scheduler and radix cache under a shadow, on a CPU and without a model: docs/findings.md.

    git clone https://github.com/sgl-project/mini-sglang && git -C mini-sglang checkout 20fcd7f
    python tests/shadow/live_mini_sglang.py mini-sglang             # the smallest requests that show it; random ones
    python tests/shadow/live_mini_sglang.py mini-sglang --remapped  # the same with the page table remapped

Needs PyTorch. What the scheduler imports besides (kernels, messages, the engine) is replaced by empty modules.
"""

import argparse
import importlib.abc
import importlib.machinery
import random
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from foreword.shadow import Report
from foreword.shadow.mini_sglang import follow

UNUSED = (
    "msgpack", "zmq", "sgl_kernel", "flashinfer", "tvm_ffi", "minisgl.engine", "minisgl.kernel", "minisgl.message",
    "minisgl.models", "minisgl.tokenizer", "minisgl.distributed", "minisgl.kvcache.mha_pool", "minisgl.scheduler.io",
    "minisgl.scheduler.config", "minisgl.utils.hf", "minisgl.utils.mp",
)  # fmt: skip


class Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == unused or name.startswith(f"{unused}.") for unused in UNUSED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Empty:
        return Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def common_length(a: torch.Tensor, b: torch.Tensor) -> int:
    size = min(len(a), len(b))
    differs = (a[:size] != b[:size]).nonzero()
    return int(differs[0]) if len(differs) else size


def import_from(checkout: Path) -> None:
    sys.path.insert(0, str(checkout / "python"))
    sys.meta_path.insert(0, EmptyModules())
    import minisgl.core
    import minisgl.kernel
    import minisgl.message

    minisgl.kernel.fast_compare_key = common_length
    minisgl.message.DetokenizeMsg = dict
    minisgl.core.Req.__hash__ = lambda self: self.uid  # the order of a set of them, equal in every run
    for name in ("empty", "tensor"):  # without a GPU no memory is pinned
        plain = getattr(torch, name)
        setattr(torch, name, lambda *args, plain=plain, pin_memory=None, **kw: plain(*args, **kw))
    torch.Tensor.pin_memory = lambda self: self


class Case(NamedTuple):
    """Requests (prompt, tokens to generate) that arrive together; pages of one token; steps."""

    requests: tuple[tuple[tuple[int, ...], int], ...]
    pages: int
    steps: int


SMALLEST = Case((((0,), 3), ((0,), 2), ((1,), 1)), pages=4, steps=14)


class Output(NamedTuple):
    next_tokens_gpu: torch.Tensor
    next_tokens_cpu: torch.Tensor
    copy_done: Any


def run(case: Case) -> Report:
    """The report of a run of the scheduler. Sampled tokens count up from 100, so that all are different."""
    from minisgl import core
    from minisgl.attention.fa import FlashAttentionBackend
    from minisgl.scheduler.cache import CacheManager
    from minisgl.scheduler.decode import DecodeManager
    from minisgl.scheduler.prefill import PrefillManager
    from minisgl.scheduler.scheduler import Scheduler
    from minisgl.scheduler.table import TableManager

    rows, sampled = 8, iter(range(100, 10**6))
    core._GLOBAL_CTX = None
    context = core.Context(1)
    core.set_global_ctx(context)
    context.page_table = torch.zeros(rows + 1, 64, dtype=torch.int32)
    backend = object.__new__(FlashAttentionBackend)
    backend.page_size, backend.kvcache = 1, SimpleNamespace(device=torch.device("cpu"))

    def pad_batch(batch: Any) -> None:
        batch.padded_reqs = batch.reqs

    def forward_batch(batch: Any, args: Any) -> Output:
        for req in batch.reqs:
            req.complete_one()
        tokens = torch.tensor([next(sampled) for _ in batch.reqs], dtype=torch.int32)
        return Output(tokens, tokens, SimpleNamespace(synchronize=lambda: None))

    scheduler = object.__new__(Scheduler)
    scheduler.engine = SimpleNamespace(
        page_table=context.page_table, num_pages=case.pages, ctx=context, attn_backend=backend, device="cpu",
        graph_runner=SimpleNamespace(pad_batch=pad_batch), sampler=SimpleNamespace(prepare=lambda batch: None),
        forward_batch=forward_batch,
    )  # fmt: skip
    scheduler.device, scheduler.finished_reqs, scheduler.eos_token_id = "cpu", set(), -1
    scheduler.table_manager = TableManager(rows, context.page_table)
    scheduler.cache_manager = CacheManager(case.pages, 1, context.page_table, "radix")
    scheduler.decode_manager = DecodeManager(1)
    scheduler.prefill_manager = PrefillManager(
        scheduler.cache_manager, scheduler.table_manager, scheduler.decode_manager
    )
    scheduler.token_pool, scheduler.prefill_budget = scheduler.table_manager.token_pool, 48
    scheduler.send_result = lambda reply: None
    shadow = follow(scheduler, first=10**6)
    with torch.inference_mode():
        for uid, (prompt, most) in enumerate(case.requests):
            ids, params = torch.tensor(prompt, dtype=torch.int32), core.SamplingParams(max_tokens=most)
            scheduler.prefill_manager.add_one_req(SimpleNamespace(uid=uid, input_ids=ids, sampling_params=params))
        for _ in range(case.steps):
            made = scheduler._schedule_next_batch()
            if made is None:
                break
            scheduler._process_last_data((made, scheduler._forward(made)))
    return shadow.report()


def remap() -> None:
    """Let the page table of a request that goes on name the pages of the prefix cache, after its own are freed."""
    from minisgl.scheduler.cache import CacheManager

    cache_req = CacheManager.cache_req

    def remapped(self: Any, req: Any, *, finished: bool) -> None:
        free = self._free
        self._free = lambda indices: free(indices.clone())  # else what is freed is a view of the table
        cache_req(self, req, finished=finished)
        self._free = free
        if not finished and (length := req.cache_handle.cached_len):
            self.page_table[req.table_idx, :length] = req.cache_handle.get_matched_indices()

    CacheManager.cache_req = remapped


def random_case(rng: random.Random) -> Case:
    prefix = [rng.randrange(50) for _ in range(12)]
    requests = [
        (tuple(prefix[: rng.choice([0, 4, 12])] + [rng.randrange(50) for _ in range(rng.randrange(1, 8))]),
         rng.randrange(1, 12))
        for _ in range(12)
    ]  # fmt: skip
    return Case(tuple(requests), 60, 80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--remapped", action="store_true")
    options = parser.parse_args()
    import_from(options.checkout)
    if options.remapped:
        remap()
    print(SMALLEST)
    print(run(SMALLEST))
    reports = [run(random_case(random.Random(seed))) for seed in range(20)]
    wrong = sum(not report.ok for report in reports)
    print(f"{len(reports)} random runs of {sum(report.num_steps for report in reports)} steps: {wrong} with findings")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
