"""Run an executor over whole texts in real steps and keep the logits of every position."""

from functools import partial
from importlib.util import find_spec
from itertools import islice

import numpy as np

from foreword.batch import InputBuffers, NewRequest, RequestStates, prepare_inputs
from foreword.executors.native import NativeExecutor
from foreword.executors.numpy import NumpyExecutor
from foreword.executors.pool import batch_groups
from foreword.native import available

FLOATS = {"numpy": {}}
"""The executors of this installation, and the options with which they compute in float32."""
EXECUTORS = {"numpy": NumpyExecutor}
if available():
    FLOATS["native"] = {"weight_format": "fp32", "kv_format": "fp32"}
    EXECUTORS["native"] = partial(NativeExecutor, **FLOATS["native"])
if find_spec("torch"):
    from foreword.executors.torch.executor import TorchExecutor

    FLOATS["torch"] = {"dtype": "fp32", "num_threads": 1}
    EXECUTORS["torch"] = partial(TorchExecutor, **FLOATS["torch"])


def all_logits(model, texts, chunks, executor="numpy", block_size=16, first_position=0, inputs=None, loras=()):
    """[len(text) − first_position, V] logits of each text. Texts share every step; ``chunks`` yields (text, tokens)
    pairs of each step. Blocks are handed out in a shuffled order. inputs: `PromptInputs` of each text. loras: the
    adapter of each text, or None.
    """
    spec = model.spec
    groups = batch_groups(spec, block_size)
    longest = max(map(len, texts)) + 1
    states = RequestStates(max_num_reqs=len(texts), max_model_len=longest, vocab_size=spec.vocab_size, kv_groups=groups)
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=sum(map(len, texts)))
    widths = [table.width for table in states.block_tables]
    num_blocks = 1 + len(texts) * sum(widths)
    shuffled = iter(np.random.default_rng(0).permutation(np.arange(1, num_blocks)).tolist())
    for i, text in enumerate(texts):
        # One token more than is computed, so that no step samples.
        more = dict(inputs[i]) if inputs else {}
        more["lora_id"] = i + 1 if loras and loras[i] else 0
        blocks = [list(islice(shuffled, width)) for width in widths]
        states.add_request(NewRequest(str(i), [*text, 0], blocks, **more))
    run = EXECUTORS[executor](spec, model.weights, num_blocks=num_blocks, block_size=block_size)
    for i, adapter in enumerate(loras):
        if adapter:
            run.load_lora(i + 1, adapter)
    kept = [[] for _ in texts]
    for plan in chunks:
        batch = prepare_inputs(states, {str(i): n for i, n in plan}, buffers)
        wanted = np.flatnonzero(batch.positions[: batch.num_tokens] >= first_position)
        logits = run.compute(batch, wanted)
        owners = batch.req_indices[wanted]
        for b, request in enumerate(batch.req_ids):
            kept[int(request)].append(logits[owners == b])
        states.commit(batch, {})
    return [np.concatenate(parts) for parts in kept]


def whole(texts):
    """All texts in one step."""
    yield [(i, len(text)) for i, text in enumerate(texts)]


def in_chunks(texts, sizes):
    """Each text in chunks of the sizes in turn, all texts in each step."""
    left = [len(text) for text in texts]
    step = 0
    while any(left):
        plan = [(i, min(n, sizes[(step + i) % len(sizes)])) for i, n in enumerate(left) if n]
        for i, n in plan:
            left[i] -= n
        step += 1
        yield plan


def log_probs(logits, token_ids):
    """Natural logarithms of the probabilities of token_ids[t] at logits[t], in float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.log(np.exp(shifted, dtype=np.float64).sum(-1))
    return shifted[np.arange(len(token_ids)), token_ids] - total
