"""An executor of your own, under Foreword's scheduler, prefix cache, sampler and server.

    python examples/own_executor.py [MODEL]
    PYTHONPATH=examples foreword serve --executor own_executor:Averages

It predicts the token that is nearest to the mean of the context's embeddings, which it keeps in a paged cache.
"""

import sys

import numpy as np

from foreword import LLM, SamplingParams
from foreword.executors import HostExecutor


class Averages(HostExecutor):
    """Made by the engine with the model's spec, its weights and the size of the pool."""

    def __init__(self, spec, weights, size):
        super().__init__()
        self.embedding = weights["embed"].dequantize()  # [V, hidden]
        self.cache = np.zeros((size.num_blocks, size.block_size, spec.hidden_size), np.float32)

    def compute(self, batch, logits_indices):
        slots = self.cache.reshape(-1, self.cache.shape[-1])  # a view: slot = block · block_size + offset
        slots[batch.slot_mapping[0]] = self.embedding[batch.input_ids]
        means = np.zeros((len(logits_indices), slots.shape[-1]), np.float32)
        for i, token in enumerate(logits_indices):
            blocks, length = batch.block_table[0][batch.req_indices[token]], batch.positions[token] + 1
            means[i] = self.cache[blocks].reshape(-1, slots.shape[-1])[:length].mean(0)
        return means @ self.embedding.T  # [L, V]

    def copy_blocks(self, sources, destinations):
        self.cache[destinations] = self.cache[sources]


if __name__ == "__main__":
    with LLM(*(sys.argv[1:] or ["smollm2"]), executor=Averages, max_model_len=256) as llm:
        print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)
