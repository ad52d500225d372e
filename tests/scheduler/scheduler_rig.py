"""A scheduler whose steps all succeed."""

import numpy as np

from foreword.batch import InputBuffers, KVGroup, RequestStates, prepare_inputs
from foreword.cache import KVCacheManager
from foreword.scheduler import Request, Scheduler, SchedulerConfig


class Rig:
    """A scheduler whose steps all succeed; every request samples token 7."""

    def __init__(self, *, blocks: int = 65, rows: int = 8, M: int = 64, groups=None, cache=None, **config) -> None:
        self.states = RequestStates(
            max_num_reqs=rows, max_model_len=M, vocab_size=100, kv_groups=groups or [KVGroup(block_size=4)]
        )
        config = {"max_num_batched_tokens": 32, "max_num_seqs": rows, "watermark": 0.0} | config
        self.cache = KVCacheManager(self.states, blocks, **{"prefix_caching": False, **(cache or {})})
        self.scheduler = Scheduler(self.states, self.cache, SchedulerConfig(**config))
        self.buffers = InputBuffers.for_states(self.states, config["max_num_batched_tokens"])
        self.arrivals = 0

    def add(self, name: str, length: int, *, max_len: int = 64, first: int = 1, **fields) -> Request:
        prompt = (np.arange(first, first + length) % 100).astype(np.int32)
        request = Request(request_id=name, prompt=prompt, arrival=self.arrivals, max_len=max_len, **fields)
        self.arrivals += 1
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        """Plan, compute, commit. Returns the plan by name."""
        plan = self.scheduler.schedule()
        self.plan = plan
        named = {
            self.scheduler.running.request_in(r).request_id: n
            for r, n in zip(plan.rows.tolist(), plan.num_scheduled.tolist(), strict=True)
        }
        if named:
            batch = prepare_inputs(self.states, (plan.rows, plan.num_scheduled), self.buffers, backend="numpy")
            self.states.commit(batch, np.full(len(plan.rows), 7, np.int32))
            self.scheduler.commit(plan)
            done = [r for r in plan.rows.tolist() if self.states.num_tokens[r] >= self.scheduler.running.max_len[r]]
            self.scheduler.finish(np.array(done, np.int32))
        return named

    def why(self, name: str) -> str:
        return str(self.scheduler.why(name))
