"""The input layer without a Python object per request: requests as columns, steps and samples as int32 arrays.

    python examples/own_arrays.py

The scheduler below is arithmetic on the arrays of `RequestStates`: every statement of a step serves all requests.
Blocks are appended when a request needs them. The model is a formula, so that the example is about the arrays only.
"""

import numpy as np

from foreword.batch import InputBatch, InputBuffers, KVGroup, NewRequests, RequestStates, prepare_inputs

VOCAB, MAX_LEN, MAX_REQS, BLOCK_SIZE, TOKENS_PER_STEP = 1000, 256, 64, 16, 256


def next_tokens(batch: InputBatch) -> np.ndarray:
    """Return a token for each request, int32 [B], in place of a model: a function of its last token and position."""
    last = batch.logits_indices
    return ((31 * batch.input_ids[last] + batch.positions[last]) % VOCAB).astype(np.int32)


def generate(prompts: np.ndarray, prompt_lens: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return int32 [N, max_tokens] for N prompts. prompts: int32, one after the other; prompt_lens: int32 [N]."""
    groups = [KVGroup(block_size=BLOCK_SIZE)]
    states = RequestStates(max_num_reqs=MAX_REQS, max_model_len=MAX_LEN, vocab_size=VOCAB, kv_groups=groups)
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=TOKENS_PER_STEP)
    table = states.block_tables[0]
    free = np.arange(1, 1 + MAX_REQS * table.width, dtype=np.int32)  # a stack; enough blocks for all rows
    starts = np.concatenate(([0], np.cumsum(prompt_lens)))
    outputs = np.empty((len(prompt_lens), max_tokens), np.int32)
    number = np.zeros(MAX_REQS, np.int32)  # row → number of its request
    rows, admitted = np.zeros(0, np.int32), 0  # the live rows, in order of admission
    while admitted < len(prompt_lens) or len(rows):
        new = np.arange(admitted, min(admitted + MAX_REQS - len(rows), len(prompt_lens)))
        if len(new):
            requests = NewRequests(
                req_ids=list(map(str, new)),
                token_ids=prompts[starts[admitted] : starts[admitted + len(new)]],
                num_tokens=prompt_lens[new],
                block_ids=[np.zeros(0, np.int32)],
                num_blocks=[np.zeros(len(new), np.int32)],
            )
            added = states.add_requests(requests)
            number[added], rows, admitted = new, np.concatenate((rows, added)), admitted + len(new)

        left = states.num_tokens[rows] - states.num_computed_tokens[rows]
        before = np.cumsum(left) - left  # tokens of the rows before this one
        counts = np.clip(TOKENS_PER_STEP - before, 0, left).astype(np.int32)
        step, counts = rows[counts > 0], counts[counts > 0]
        end = states.num_computed_tokens[step] + counts
        grow = np.repeat(step, -(-end // BLOCK_SIZE) - table.num_blocks[step])
        free, blocks = np.split(free, [len(free) - len(grow)])
        states.append_blocks_rows(grow, blocks)

        batch = prepare_inputs(states, (step, counts), buffers)
        states.commit(batch, next_tokens(batch))

        length = prompt_lens[number[rows]]
        done = states.num_tokens[rows] == length + max_tokens
        finished, length = rows[done], length[done]
        outputs[number[finished]] = states.token_ids[finished[:, None], length[:, None] + np.arange(max_tokens)]
        held = np.arange(table.width) < table.num_blocks[finished, None]
        free = np.concatenate((free, table.table[finished][held]))
        states.remove_rows(finished)
        rows = rows[~done]
    return outputs


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    lens = rng.integers(1, 100, 200).astype(np.int32)
    tokens = generate(rng.integers(0, VOCAB, lens.sum()).astype(np.int32), lens, max_tokens=32)
    print(f"{len(lens)} prompts, {lens.sum()} prompt tokens, {tokens.size} tokens generated")
    for i in range(3):
        print(f"request {i}: {tokens[i, :8].tolist()} …")
