"""An observer of your own: the number of requests and tokens of every step.

python examples/own_observer.py [MODEL]
PYTHONPATH=examples foreword serve --observer own_observer:Sizes
"""

import sys

from foreword import LLM, SamplingParams
from foreword.engine import EngineObserver


class Sizes(EngineObserver):
    """Prints each step before it runs. `EngineObserver` has the other events."""

    def step_planned(self, plan, batch):
        print(f"step {batch.step}: {batch.num_reqs} requests, {batch.num_tokens} tokens", file=sys.stderr)


if __name__ == "__main__":
    with LLM(*(sys.argv[1:] or ["smollm2"]), observers=[Sizes()], max_model_len=256) as llm:
        llm.generate([[5, 6, 7], [8]], SamplingParams(temperature=0, max_tokens=3))
