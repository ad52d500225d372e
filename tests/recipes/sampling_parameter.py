"""A sampling parameter: a number that is added to the logit of token 0."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, SamplingParams, prepare_inputs
from foreword.batch.features.sampling import sampling_metadata
from foreword.batch.proof.spec import TENSORS
from foreword.cli.app import app
from foreword.errors import RequestError
from foreword.openai.request import parse_completion
from foreword.sampling import Processors, Sampler
from recipes.recipe import Edit, Recipe, after, before, field_of

TEST = "tests/sampling/test_dummy_parameter.py"
TABLE = "src/foreword/batch/values/parameters.py"
ROW = """    dummy_bonus: float = parameter(
        0.0, "Add this to the logit of token 0.",
        least=-9.0, most=9.0, column=Column(F32, Need.DUMMY, "!=", 0.0), fix="Use 0.0 for none.",
    )
"""
RULE = "    logits[0] += params.dummy_bonus\n"
RECIPE = Recipe(
    heading="A sampling parameter",
    test=TEST,
    edits=(
        Edit("src/foreword/batch/values/sampling_params.py", field_of("SamplingParams", ROW), TEST),
        Edit(TABLE, after("    DRY = 65536\n", "    DUMMY = 131072\n"), TEST),
        Edit(TABLE, after("\nCHANGING = ", "Need.DUMMY | "), TEST),
        Edit(
            "src/foreword/sampling/reference.py",
            before("    text = np.concatenate([prompt, output]).tolist()\n", RULE),
            TEST,
        ),
        Edit(
            "tests/sampling/test_native_rows.py",
            after("    return SamplingParams(\n", "        dummy_bonus=one_of(0.0, -3.5, 8.0),\n"),
            "tests/sampling/test_native_rows.py",
        ),
    ),
    proofs=("tests/batch/test_parameters.py", "tests/sampling/test_native_rows.py"),
    native=(
        Edit("native/kernels/parameters.h", before("  X(float, temperature) ", "  X(float, dummy_bonus) \\\n")),
        Edit(
            "native/kernels/sampling_rules.cpp",
            before("  if (parameters.dry_multiplier > 0.f) {\n", "  x[0] += parameters.dummy_bonus;\n"),
        ),
    ),
    not_followed={"native/kernels/sampler.cpp": "the dummy changes logits before the draw"}
    | dict.fromkeys(
        (f"src/foreword/device/{name}.py" for name in ("kernels/sampling", "layout", "sampling")),
        "a parameter without them is sampled on the host",
    ),
)


def test_the_parameter_is_checked_and_held_by_a_column():
    states = RequestStates(max_num_reqs=2, max_model_len=8, vocab_size=50, kv_groups=[KVGroup(4)])
    row = states.add_request(NewRequest("a", [1], [[1]], sampling_params=SamplingParams(dummy_bonus=2.5)))
    assert states.sampling.dummy_bonus[row] == 2.5
    assert "dummy_bonus" in {spec.name for spec in TENSORS}
    with pytest.raises(RequestError, match=r"dummy_bonus = 10.*must be from -9 to 9"):
        SamplingParams(dummy_bonus=10)


def test_the_parameter_is_an_option_a_field_of_bodies_and_on_the_pages():
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    assert "--dummy-bonus" in shown
    assert parse_completion({"model": "m", "prompt": "a", "dummy_bonus": 2.5}).params.dummy_bonus == 2.5
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "sampling-parameters.md").read_text(encoding="utf-8")
    assert "| `dummy_bonus` | `float` | `0.0` | -9 to 9 | Add this to the logit of token 0. |" in page
    assert "**`dummy_bonus`** [R] float32" in (docs / "tensors.md").read_text(encoding="utf-8")


def test_the_parameter_changes_what_is_sampled():
    states = RequestStates(max_num_reqs=2, max_model_len=8, vocab_size=5, kv_groups=[KVGroup(4)])
    processors = Processors(states)
    for name, bonus in (("a", 0.0), ("b", 3.0)):
        params = SamplingParams(temperature=0.0, dummy_bonus=bonus)
        states.add_request(NewRequest(name, [1], [[1]], sampling_params=params))
    batch = prepare_inputs(states, {"a": 1, "b": 1}, InputBuffers.for_states(states, 8))
    logits = np.array([[0, 1, 2, 0, 0]] * 2, np.float32)
    sampled = Sampler().sample(batch, logits, processors.step(sampling_metadata(batch)))
    assert sampled.token_ids.tolist() == [2, 0]
