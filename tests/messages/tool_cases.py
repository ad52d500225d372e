"""Calls of tools by a real model, on cases of the Berkeley Function Calling Leaderboard as its package ships them.

python -m pip install --no-deps bfcl-eval
PYTHONPATH=src:tests python -m messages.tool_cases --cases 40

A call is well formed if its arguments are a JSON object that its tool's schema allows, and right if it is the one that
the case expects, as the leaderboard compares values. "required" demands a call; with "auto" the model may answer in
words, which "irrelevance" expects. generic: tools in words, as for models whose templates have no place for them.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema

from foreword import LLM, SamplingParams
from foreword.errors import RequestError
from foreword.messages import FORMATS

TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""What the leaderboard calls types of JSON schemas."""
GROUPS = ("simple_python", "multiple", "parallel", "irrelevance")


def schema(given: Any) -> Any:
    """A schema of the leaderboard as a JSON schema."""
    if isinstance(given, list):
        return [schema(item) for item in given]
    if not isinstance(given, dict):
        return given
    found = {key: schema(value) for key, value in given.items() if key != "optional"}
    if isinstance(kind := found.get("type"), str) and TYPES.get(kind, kind) is None:
        del found["type"]
    elif isinstance(kind, str):
        found["type"] = TYPES.get(kind, kind)
    return found


def cases(directory: Path, group: str, count: int) -> Iterator[tuple[list[Any], list[Any], list[Any]]]:
    """Messages, tools and expected calls."""
    name = f"BFCL_v4_{group}.json"
    answers = directory / "possible_answer" / name
    expected = {}
    if answers.exists():
        expected = {one["id"]: one["ground_truth"] for one in map(json.loads, answers.read_text().splitlines())}
    for line in (directory / name).read_text().splitlines()[:count]:
        case = json.loads(line)
        tools = [
            {"type": "function", "function": {**one, "parameters": schema(one["parameters"])}}
            for one in case["function"]
        ]
        yield case["question"][0], tools, expected.get(case["id"], [])


def is_right(call: tuple[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether a call is the expected one: each argument has one of its values; "" allows its absence."""
    name, arguments = call
    (known, values), *_ = expected.items()
    if name != known or not isinstance(arguments, dict) or arguments.keys() - values.keys():
        return False
    return all(
        any(_same(arguments[key], one) for one in allowed) if key in arguments else "" in allowed
        for key, allowed in values.items()
    )


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, str) and isinstance(expected, str):
        return _plain(value) == _plain(expected)
    if isinstance(value, dict) and isinstance(expected, dict):
        return all(any(_same(value.get(key), one) for one in allowed) for key, allowed in expected.items())
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


def _plain(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())


def measure(llm: LLM, directory: Path, group: str, count: int, choice: str, format: str | None) -> Counter[str]:
    """Counts of answers and calls."""
    found: Counter[str] = Counter()
    params = SamplingParams(temperature=0.0, max_tokens=128)
    for messages, tools, expected in cases(directory, group, count):
        found["cases"] += 1
        try:
            (output,) = llm.chat(
                messages, params, tools=tools, tool_choice=choice, message_format=format, progress=False
            )
        except RequestError as error:
            found["refused"] += 1
            print(f"refused: {group}: {error}", file=sys.stderr)
            continue
        calls = output.outputs[0].message.tool_calls
        found["with calls"] += bool(calls)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        read = []
        for call in calls:
            found["calls"] += 1
            if call.error is not None:
                found[call.error] += 1
                continue
            arguments = json.loads(call.arguments)
            read.append((call.name, arguments))
            try:
                jsonschema.validate(arguments, schemas[call.name])
            except (jsonschema.ValidationError, jsonschema.SchemaError, KeyError):
                found["not valid"] += 1
        left = list(expected)
        for call in read:
            match = next((one for one in left if is_right(call, one)), None)
            if match is not None:
                left.remove(match)
        found["right"] += not left and len(read) == len(expected) == len(calls)
        found["right names"] += sorted(name for name, _ in read) == sorted(next(iter(one)) for one in expected)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40, help="of each group")
    parser.add_argument("--model", default="smollm2")
    forms = ["own", *(name for name, format in FORMATS.items() if format.writes_calls)]
    parser.add_argument("--form", choices=forms, help="one alone: the model's own, or another; generic: tools in words")
    options = parser.parse_args()
    package = find_spec("bfcl_eval")
    if package is None or package.origin is None:
        print("the cases are in the package bfcl-eval: python -m pip install --no-deps bfcl-eval", file=sys.stderr)
        return 2
    directory, num_malformed = Path(package.origin).parent / "data", 0
    llm = LLM(options.model, max_model_len=4096)
    for format in {"own": (None,), None: (None, "generic")}.get(options.form, (options.form,)):
        for choice in ("auto", "required"):
            for group in GROUPS if choice == "auto" else GROUPS[:3]:
                start = time.perf_counter()
                found = measure(llm, directory, group, options.cases, choice, format)
                num_malformed += found["malformed"]
                seconds = time.perf_counter() - start
                print(f"{format or 'own'} {choice} {group}: {dict(found)} in {seconds:.0f} s", flush=True)
    return num_malformed > 0


if __name__ == "__main__":
    sys.exit(main())
