"""A logits processor of your own: requests name tokens that they never use, in ``extra_args``.

python examples/own_processor.py [MODEL]
PYTHONPATH=examples foreword serve --logits-processor own_processor:Avoid
PYTHONPATH=examples foreword run "Hi" --logits-processor own_processor:Avoid --extra-args "avoid=[19556]"
"""

import sys

import numpy as np

from foreword import LLM, SamplingParams
from foreword.errors import RequestError
from foreword.sampling import RowValues


class Avoid:
    """Made by the engine with its `RequestStates`. A row of the states that has no value is left alone."""

    extra_args = frozenset({"avoid"})

    def __init__(self, states):
        self.rows, self.vocab_size = RowValues(states.max_num_reqs), states.vocab_size

    def update(self, change):
        self.rows.update(change, self.tokens)

    def tokens(self, added):
        """Return the tokens of a request that enters, None for none. A RequestError ends this request alone."""
        avoid = (added.params.extra_args or {}).get("avoid")
        if avoid is None:
            return None
        if not isinstance(avoid, list) or not all(token in range(self.vocab_size) for token in avoid):
            raise RequestError(added.req_id, "extra_args", avoid, "avoid is not a list of token ids", "Correct it.")
        return avoid

    def apply(self, logits, at):
        for i, row in enumerate(at.rows.tolist()):  # each of these rows has a value
            logits[i, self.rows[row]] = -np.inf


if __name__ == "__main__":
    with LLM(*(sys.argv[1:] or ["smollm2"]), logits_processors=[Avoid], max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        [first] = llm.generate([[5, 6, 7]], params)
        avoid = {"avoid": list(first.outputs[0].token_ids)}
        [second] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, extra_args=avoid))
        print(first.outputs[0].token_ids, second.outputs[0].token_ids)
