"""Check the steps of another engine while it runs: each step is prepared again and every tensor is compared.

    shadow = Shadow(states, max_num_batched_tokens=…, num_blocks=…, on_finding=log_finding)
    shadow.decide(scheduler_output)                # what the scheduler decided, as vLLM sends it; or shadow.plan({…})
    shadow.step(req_ids, {"input_ids": …, …})      # what the runner made of it, by our names: list[Finding]
    shadow.commit({req_id: [token]})               # what was sampled
    print(shadow.report())

The package needs only NumPy. docs/shadow.md describes what is checked, what cannot be seen, and the cost.
"""

from foreword.batch import GroupUse
from foreword.check_options import Level
from foreword.shadow.finding import Finding, FindingError, Origin, log_finding, raise_finding
from foreword.shadow.report import Report
from foreword.shadow.shadow import Scheduled, Shadow

__all__ = [
    "Finding", "FindingError", "GroupUse", "Level", "Origin", "Report", "Scheduled", "Shadow", "log_finding",
    "raise_finding",
]  # fmt: skip
