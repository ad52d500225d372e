"""vLLM on the CPU: its second model runner with the functions of `foreword.vllm` samples the tokens that it should."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None or "TRITON_DIRECTORY" not in os.environ:
    pytest.skip("needs vLLM and Triton: `make vllm`", allow_module_level=True)

from serving import greedy_deficits, write_model

HERE = Path(__file__).parent
TIE = 4e-5
"""Logits this close are equal: of float32 in either runner they were at most 1.6e-5 from those of float64. In a step
with other requests, or with drafts, the sums of a product are taken in another order. But for one tie of 1.3e-6 (a
logit of 5.49), the two largest logits of the outputs are at least 1e-3 apart.
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


def served(model, kernels, *options):
    """The answers of a process of vLLM."""
    variables = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if kernels == "triton":
        variables["TRITON_INTERPRET"] = "1"
        paths.append(os.environ["TRITON_DIRECTORY"])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, str(HERE / "serving.py"), kernels, str(model), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize("options", [[], ["--drafts"]], ids=["plain", "drafts"])
def test_greedy_tokens_are_those_of_the_first_model_runner_except_after_a_tie(model, options):
    first, second = (
        served(model, kernels, "--greedy", "--requests", "24", *options) for kernels in ("v1", "functions")
    )
    assert first["runner"] != second["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert sum(map(len, second["tokens"])) > 200
    assert second["preemptions"] > 0
    for runner in (first, second):
        deficits = greedy_deficits(model, runner["prompts"], runner["tokens"])
        assert max(map(max, deficits)) < TIE, "a token that is not the likeliest after the tokens before it"
    differing = sum(a != b for a, b in zip(first["tokens"], second["tokens"], strict=True))
    assert differing <= 1  # what follows the tie, where the runners took different sides


@pytest.mark.parametrize("options", [[], ["--drafts"]], ids=["plain", "drafts"])
def test_sampled_tokens_and_logprobs_are_those_of_vllms_kernels_in_the_interpreter(model, options):
    own, functions = (served(model, kernels, "--requests", "6", *options) for kernels in ("triton", "functions"))
    assert sum(map(len, functions["tokens"])) > 30
    assert any(functions["logprobs"])
    assert functions == own
