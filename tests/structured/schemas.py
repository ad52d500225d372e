"""Public schemas, and outputs of a real model under them.

python tests/structured/schemas.py --outputs 1000
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from foreword import LLM, SamplingParams
from foreword.errors import RequestError

DATA = Path(__file__).parents[1] / "data" / "schemas"
FUNCTIONS: dict[str, Any] = json.loads((DATA / "functions.json").read_text())


@dataclass
class Tally:
    """Outputs by how they ended, schemas refused with the reason, and what is wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0


def check_outputs(llm: LLM, num_outputs: int, *, max_tokens: int = 200, batch: int = 200) -> Tally:
    """At temperature 1: each output that was not cut off parses, and is valid against its schema."""
    tally, names = Tally(), sorted(FUNCTIONS)
    for start in range(0, num_outputs, batch):
        asked, prompts, params = [], [], []
        for i in range(start, min(start + batch, num_outputs)):
            name = names[i % len(names)]
            request = SamplingParams(
                temperature=1.0, seed=i, max_tokens=max_tokens, structured_outputs={"json": FUNCTIONS[name]}
            )
            try:
                llm.engine.check("a", [1], request)
            except RequestError as error:
                tally.refused[name] = error.reason
                continue
            asked.append(name)
            params.append(request)
            prompts.append([{"role": "user", "content": f"Call the function with arguments for case {i}, in JSON."}])
        for name, output in zip(asked, llm.chat(prompts, params, progress=False) if prompts else [], strict=True):
            completion = output.outputs[0]
            tally.ends[str(completion.finish_reason)] += 1
            tally.num_tokens += len(completion.token_ids)
            if completion.finish_reason == "length":
                continue
            try:
                assert completion.finish_reason == "stop", output.error
                jsonschema.validate(json.loads(completion.text), FUNCTIONS[name])
            except Exception as error:
                tally.wrong.append(f"{name}: {completion.text!r}: {error!s:.300}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    start = time.perf_counter()
    tally = check_outputs(LLM(options.model, max_model_len=1024), options.outputs, max_tokens=options.max_tokens)
    for name, reason in tally.refused.items():
        print(f"refused: {name}: {reason}")
    for line in tally.wrong:
        print(f"wrong: {line}")
    print(
        f"{sum(tally.ends.values())} outputs, {dict(tally.ends)}, {tally.num_tokens} tokens, "
        f"{len(tally.wrong)} wrong, {time.perf_counter() - start:.0f} s"
    )
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
