"""A paged engine in 60 lines. `foreword.batch` prepares the steps; NumPy runs a random decoder over a paged cache.

    python examples/paged_engine.py

A request is admitted when enough blocks are free for its prompt and its answer, so no request is preempted.
"""

import numpy as np

from foreword.batch import InputBatch, InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs

VOCAB, HIDDEN, LAYERS, HEADS, MAX_LEN = 101, 32, 2, 4, 64
BLOCK_SIZE, NUM_BLOCKS, MAX_REQS, TOKENS_PER_STEP = 4, 10, 4, 6

rng = np.random.default_rng(0)
EMBEDDING, POSITION = rng.normal(size=(VOCAB, HIDDEN)), rng.normal(size=(MAX_LEN, HIDDEN))
QKV = rng.normal(size=(LAYERS, HIDDEN, 3 * HIDDEN)) / HIDDEN**0.5
OUT = rng.normal(size=(LAYERS, HIDDEN, HIDDEN)) / HIDDEN**0.5
CACHE = np.zeros((2, LAYERS, NUM_BLOCKS, BLOCK_SIZE, HIDDEN))  # keys and values


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return causal attention of the tokens at ``positions`` over all keys of their request, per head."""
    q, k, v = (x.reshape(len(x), HEADS, -1).swapaxes(0, 1) for x in (q, k, v))
    scores = np.where(np.arange(k.shape[1]) <= positions[:, None], q @ k.swapaxes(1, 2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(-1, HIDDEN)


def forward(batch: InputBatch) -> np.ndarray:
    """Return the logits [L, V] of a step; prefills, chunks and decodes are the same to it."""
    x = EMBEDDING[batch.input_ids] + POSITION[batch.positions]
    for layer in range(LAYERS):
        q, k, v = np.split(x @ QKV[layer], 3, axis=1)
        keys, values = CACHE[:, layer]
        keys.reshape(-1, HIDDEN)[batch.slot_mapping[0]] = k
        values.reshape(-1, HIDDEN)[batch.slot_mapping[0]] = v
        for b, length in enumerate(batch.seq_lens):
            tokens, blocks = slice(*batch.query_start_loc[b : b + 2]), batch.block_table[0][b]
            k, v = (cache[blocks].reshape(-1, HIDDEN)[:length] for cache in (keys, values))
            x[tokens] += attend(q[tokens], k, v, batch.positions[tokens]) @ OUT[layer]
    return x[batch.logits_indices] @ EMBEDDING.T


def generate(prompts: dict[str, list[int]], max_tokens: int) -> dict[str, list[int]]:
    """Generate ``max_tokens`` greedy tokens for each prompt. A step has prompt chunks of some requests and decodes of
    others.
    """
    groups = [KVGroup(block_size=BLOCK_SIZE)]
    states = RequestStates(max_num_reqs=MAX_REQS, max_model_len=MAX_LEN, vocab_size=VOCAB, kv_groups=groups)
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=TOKENS_PER_STEP)
    waiting, blocks_of, outputs = list(prompts), {}, {}
    free = list(range(1, NUM_BLOCKS))  # block 0 is reserved: it means "no block"
    while waiting or blocks_of:
        while waiting and len(states) < MAX_REQS:
            need = -(-(len(prompts[waiting[0]]) + max_tokens) // BLOCK_SIZE)
            if need > len(free):
                break
            req_id = waiting.pop(0)
            blocks_of[req_id], free = free[:need], free[need:]
            states.add_request(NewRequest(req_id, prompts[req_id], block_ids=[blocks_of[req_id]]))
        if not blocks_of:
            raise ValueError(f"request {waiting[0]!r}: needs {need} blocks, the cache has {len(free)}")
        plan, budget = {}, TOKENS_PER_STEP
        for req_id in blocks_of:
            row = states.row_of(req_id)
            if count := min(int(states.num_tokens[row] - states.num_computed_tokens[row]), budget):
                plan[req_id], budget = count, budget - count
        batch = prepare_inputs(states, plan, buffers, check="full")  # check: only while the engine is being written
        states.commit(batch, forward(batch).argmax(1))  # the sample of an unfinished prompt is discarded
        for req_id in plan:
            row, length = states.row_of(req_id), len(prompts[req_id])
            if states.num_tokens[row] == length + max_tokens:
                outputs[req_id] = states.token_ids[row, length : length + max_tokens].tolist()
                free += blocks_of.pop(req_id)
                states.remove_request(req_id)
    return outputs


if __name__ == "__main__":
    PROMPTS = {"a": [5, 17, 3], "b": list(range(20, 31)), "c": [64, 2, 64, 2, 9]}
    for name, tokens in generate(PROMPTS, max_tokens=6).items():
        print(name, PROMPTS[name], "->", tokens)
