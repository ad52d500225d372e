"""Runs a tiny model of every causal type of transformers over paged steps, against its own forward pass.

    python tools/transformers_coverage/check.py            or: make transformers
    python tools/transformers_coverage/check.py llama gpt2
    python tools/transformers_coverage/check.py --write    record what runs, for the page that `make pages` writes

A type that runs in coverage.json and does not run here, or runs with a cache of its own where it had paged attention,
fails the check, and so does a type that is neither native nor in the table of not_native.py. Prompts in chunks, mixed
steps, requests that are preempted and prompts with cached prefixes: each token's log-probability is compared with an
eager forward pass.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import transformers
from not_native import NOT_NATIVE
from tiny import VOCAB_SIZE, causal_types, tiny_model
from transformers import PreTrainedModel

from foreword.batch import SamplingParams
from foreword.engine import Engine, EngineConfig, EngineMetrics, RequestOutput
from foreword.errors import ModelError
from foreword.executors.pool import batch_groups
from foreword.executors.transformers.executor import TransformersExecutor
from foreword.executors.transformers.interface import attention_of, forward
from foreword.executors.transformers.model import served
from foreword.executors.transformers.own_cache import OwnCacheExecutor, OwnCacheTrace
from foreword.executors.transformers.trace import Trace
from foreword.executors.transformers.verify import Inputs
from foreword.models.families import FAMILIES, TEXT_MODELS
from foreword.scheduler import SchedulerConfig

HERE = Path(__file__).resolve().parent
RECORD = HERE / "coverage.json"
MAX_LEN, BLOCK_SIZE = 96, 4
BLOCKS, WINDOW_BLOCKS = 30, 12  # in a KV group, and in one with a window: too few for six requests
CACHES = 5  # for models with caches of their own: too few for six requests
PAGED, OWN_CACHE, NOT = "paged attention", "own cache", "no"
TOLERANCE = 1e-3  # the largest difference of log-probabilities, in float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    types = options.types or causal_types()
    if unexplained := set(types) - {*FAMILIES, *TEXT_MODELS, *NOT_NATIVE}:
        sys.exit(f"neither native nor with a reason in not_native.py: {', '.join(sorted(unexplained))}")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        found = {}
        for model_type, result in zip(types, pool.map(checked, types), strict=True):
            found[model_type] = result
            print(f"{model_type}: {result['runs']}{result['reason'] and ': '}{result['reason']}", flush=True)
    num_run = sum(result["runs"] != NOT for result in found.values())
    print(f"{num_run} of {len(found)} types run")
    recorded = json.loads(RECORD.read_text())["types"]
    if options.write:
        record = {"transformers": transformers.__version__, "types": recorded | found}
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    elif lost := [name for name in found if rank(found[name]) < rank(recorded.get(name, {"runs": NOT}))]:
        sys.exit(f"no longer running as recorded: {', '.join(lost)}")


def rank(result: dict[str, str]) -> int:
    """Return the place of a result among those from the worst to the best."""
    return (NOT, OWN_CACHE, PAGED).index(result["runs"])


def checked(model_type: str) -> dict[str, str]:
    """Return the way in which a type runs, and the reason why it does not run better."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable()
    try:
        model = tiny_model(model_type)
        found, inputs = served(model, MAX_LEN)
        compare(model, found, inputs)
    except ModelError as error:
        return {"runs": NOT, "reason": str(error)}
    except Exception as error:  # configurations and models raise errors of any kind
        reason = " ".join(str(error).split()) or type(error).__name__
        return {"runs": NOT, "reason": f"error: {reason:.200}"}
    if isinstance(found, OwnCacheTrace):
        return {"runs": OWN_CACHE, "reason": found.why_not_paged}
    return {"runs": PAGED, "reason": ""}


def compare(model: PreTrainedModel, found: Trace, inputs: Inputs) -> None:
    """Serve waves of requests, then check the log-probability of every token. Raise ModelError for a difference."""
    rng = np.random.default_rng(0)
    executor: TransformersExecutor | OwnCacheExecutor
    if isinstance(found, OwnCacheTrace):
        num_blocks = 1 + CACHES
        executor = OwnCacheExecutor(model, found, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    else:
        num_blocks = 1 + sum(BLOCKS if group.sliding_window is None else WINDOW_BLOCKS for group in found.groups)
        executor = TransformersExecutor(model, found, num_blocks=num_blocks, block_size=BLOCK_SIZE, **inputs._asdict())
    metrics = EngineMetrics()
    engine = Engine(
        executor,
        vocab_size=found.vocab_size,
        max_model_len=MAX_LEN,
        kv_groups=batch_groups(found, BLOCK_SIZE),
        num_blocks=num_blocks,
        config=EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, watermark=0.0),
            block_size=BLOCK_SIZE,
            check="full",
        ),
        observers=[metrics],
    )
    prompts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in (3, 9, 20, 31, 14, 26)]
    longer = [*prompts[3], *rng.integers(3, VOCAB_SIZE, 5).tolist()]
    waves = (prompts, 16), (prompts[3:4], 2), ([longer], 6)
    outputs = [output for wave, max_tokens in waves for output in serve(engine, wave, max_tokens)]
    executor.close()
    # A request whose layers all have windows holds few blocks, and is admitted only when they are free.
    # One with a cache of its own needs no further block, and is not preempted for one.
    preempts = any(group.sliding_window is None and not group.recurrent for group in found.groups)
    if not metrics.num_cached_tokens or (preempts and not metrics.num_preemptions):
        raise ModelError("the engine preempted no request, or found no prefix in its cache")
    with torch.inference_mode(), attention_of(model, "eager"):
        for output in outputs:
            tokens = output.outputs[0].token_ids
            ids = torch.tensor([[*output.prompt_token_ids, *tokens]])
            expected = torch.log_softmax(forward(model, input_ids=ids).double(), -1).numpy()
            for i, (token, of_token) in enumerate(zip(tokens, output.outputs[0].logprobs or (), strict=True)):
                exact = expected[len(output.prompt_token_ids) + i - 1]
                error = abs(of_token[token].logprob - exact[token])
                if error > TOLERANCE or exact.max() - exact[token] > TOLERANCE:
                    raise ModelError(f"token {i} of request {output.request_id} differs by {error:.2g}")


def serve(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[RequestOutput]:
    """Return the final outputs of some prompts, served together."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs = []
    while engine.has_work:
        outputs += [output for output in engine.step() if output.finished]
    return outputs


if __name__ == "__main__":
    main()
