"""A drafter of your own: it proposes that each request goes on as one of the texts that it was given before.

    python examples/own_drafter.py [MODEL]

The engine verifies all drafts in one step, so that the output is the same with any drafter.
"""

import sys

import numpy as np

from foreword import LLM, SamplingParams


class Remembered:
    """Made by the engine with its `RequestStates`. texts: lists of token ids."""

    relative_cost = 0.0  # the cost of a draft, in steps of the model

    def __init__(self, states, texts=()):
        self.states, self.texts = states, [np.array(text, np.int32) for text in texts]

    def propose(self, rows, most):
        drafts = np.full((len(rows), max(most.max(initial=0), 1)), -1, np.int32)
        for i, row in enumerate(rows.tolist()):
            last = self.states.token_ids[row, self.states.num_tokens[row] - 1]
            for text in self.texts:
                for at in np.flatnonzero(text == last)[:1]:
                    found = text[at + 1 : at + 1 + most[i]]
                    drafts[i, : len(found)] = found
        return drafts


if __name__ == "__main__":
    model, params = (sys.argv[1:] or ["smollm2"])[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(model, max_model_len=256) as llm:
        [plain] = llm.generate([[5, 6, 7]], params)
    tokens = plain.outputs[0].token_ids
    with LLM(model, drafter=lambda states: Remembered(states, [tokens]), max_model_len=256) as llm:
        [drafted] = llm.generate([[5, 6, 7]], params)
        print(drafted.outputs[0].token_ids == tokens, llm.engine.speculation.stats)
