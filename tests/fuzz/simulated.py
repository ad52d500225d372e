"""A small simulation, in which what a file holds is used."""

from foreword.scheduler import SchedulerConfig
from foreword.simulation import CostModel, Fleet, Trace, simulate

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256)


def run(trace: Trace, cost: CostModel) -> None:
    """The first requests of the trace, twice; the longest one of all decides how long a request may be."""
    requests = trace.requests(min(2 * len(trace.arrivals), 40))
    fleet = Fleet(
        max_model_len=trace.max_length, num_blocks=64, block_size=64, config=CONFIG, cost=cost, num_replicas=2
    )
    report = simulate(requests, fleet)
    assert report.num_leaked_blocks == 0
    report.memory_use.plot()
    report.time_to_first_token.percentile(50)
