"""One engine that answers lines: a seed → the rates of a prompt of 512 tokens, and of the tokens that follow, as JSON.

    python family_worker.py llama.cpp FILE        in the environment `xllamacpp`
    python family_worker.py WEIGHT_FORMAT FILE    in one with Foreword

With one thread, and the time of the processor, which other programs disturb least.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

PROMPT, OUTPUT, LENGTH = 512, 32, 2048
Generate = Callable[[list[int], int], None]


def llama_cpp(path: str) -> Generate:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = path, 1, LENGTH
    params.n_batch, params.n_ubatch = LENGTH, PROMPT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.verbosity = False, -1
    server = xllamacpp.Server(params)

    def generate(prompt: list[int], count: int) -> None:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions(body)
        if answer.get("usage", {}).get("completion_tokens") != count:
            raise RuntimeError(f"llama.cpp: {answer}")

    return generate


def foreword(path: str, weight_format: str) -> Generate:
    from foreword import LLM, SamplingParams

    llm = LLM(
        path, num_threads=1, max_num_seqs=1, max_model_len=LENGTH, prefix_caching=False, speculation="off",
        weight_format=weight_format, weight_cache_bytes=0,
    )  # fmt: skip
    return lambda prompt, count: list(
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    ).clear()


def main() -> None:
    engine, path = sys.argv[1:]
    generate = llama_cpp(path) if engine == "llama.cpp" else foreword(path, engine)
    print("ready", flush=True)
    for line in sys.stdin:
        draw = random.Random(int(line))
        prompt = [draw.randrange(3, 8000) for _ in range(PROMPT)]
        times = [time.process_time()]
        for count in (1, 1 + OUTPUT):
            generate(prompt, count)
            times.append(time.process_time())
        first, whole = times[1] - times[0], times[2] - times[1]
        print(json.dumps({"decode": OUTPUT / (whole - first), "prefill": PROMPT / first}), flush=True)


if __name__ == "__main__":
    main()
