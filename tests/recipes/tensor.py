"""A tensor of every step: the length of each request's prompt, int32."""

from pathlib import Path

import numpy as np
import pytest

from foreword.batch import PlanError, prepare_inputs, validate
from recipes.recipe import Edit, Recipe, after, before

TEST = "tests/batch/test_dummy_tensor.py"
SPEC, MODEL = "tests/batch/test_spec.py", "tests/batch/test_random_traces.py"
LIVES = tuple(f"{MODEL}::test_every_tensor_of_every_step_equals_the_model[{seed}]" for seed in range(3))
RULES = tuple(
    f"{SPEC}::test_{name}"
    for name in (
        "every_array_of_a_batch_is_specified",
        "the_comment_beside_each_view_is_the_table",
        "a_prepared_batch_keeps_every_rule",
        "every_value_is_in_the_range_its_page_states",
        "a_rule_removed_lets_a_corruption_through",
        "one_flipped_entry_of_a_batch_is_named[mixed]",
    )
)
"""Tests of the specification, with one of the scenes where each takes a second."""
GOLDEN = "the_shipped_traces_are_those_of_the_defining_backend", "the_golden_traces_hold_every_tensor"
FIELD = '    Field("dummy_lens", ("B",), "int32"),\n'
SPECIFICATION = """    _request(
        "dummy_lens",
        "tokens of the request's prompt",
        Relation(
            "dummy_lens[b] = states.prompt_len[idx_mapping[b]]",
            lambda s, x, g: np.where(s.cancelled, 0, s.state("prompt_len")[s.rows]),
        ),
        consumers="nothing",
    ),
"""
RECIPE = Recipe(
    heading="A tensor of every step",
    test=TEST,
    edits=(
        Edit("src/foreword/batch/step/layout.py", after("\nSTEP = (\n", FIELD), TEST),
        Edit(
            "src/foreword/batch/step/tensors.py",
            before("    idx_mapping = View", "    dummy_lens = View[I32]()  # [B] int32\n"),
            f"{SPEC}::test_every_array_of_a_batch_is_specified",
        ),
        Edit(
            "src/foreword/batch/prepare/backends/loops.py",
            after("    # Requests.\n    for b in range(B):\n", '        out["dummy_lens"][b] = prompt[b]\n'),
            LIVES[0],
        ),
        Edit(
            "src/foreword/batch/prepare/backends/vectorized.py",
            before('    out["num_scheduled_tokens"][:B] = n\n', '    out["dummy_lens"][:B] = prompt\n'),
            LIVES[0],
        ),
        Edit(
            "src/foreword/batch/proof/spec/request.py",
            before('    _request(\n        "idx_mapping", ', SPECIFICATION),
            f"{SPEC}::test_every_array_of_a_batch_is_specified",
        ),
        Edit(
            "tests/batch/batch_model.py",
            after(
                "        out: dict[str, list] = {\n",
                '            "dummy_lens": [0 if s.is_cancelled else len(s.request.prompt) for s in step],\n',
            ),
            f"{MODEL}::test_the_model_has_every_tensor_of_a_step",
        ),
    ),
    commands=(("-m", "foreword.insight.golden", "src/foreword/insight/vectors"),),
    proofs=(*LIVES, *RULES, *(f"tests/insight/test_conform.py::test_{name}" for name in GOLDEN)),
    native=(
        Edit("native/batch/arrays.h", before("  X(int64_t, scalars) ", "  X(int32_t, dummy_lens) \\\n")),
        Edit(
            "native/batch/step.cpp",
            after(
                "  take(s.num_placeholders, rows, B, o.num_placeholders);\n",
                "  take(s.prompt_len, rows, B, o.dummy_lens);\n"
                "  for (int64_t b = 0; plan.cancelled && b < B; ++b) o.dummy_lens[b] *= !plan.cancelled[b];\n",
            ),
        ),
    ),
    not_followed={"src/foreword/device/kernels/prepare.py": "the tensor is not on a device"},
)


def test_a_batch_has_the_tensor_and_a_full_check_holds_it():
    from batch_rig import World  # in the folder that the copy has this file in

    world = World()
    world.add("a", [1, 2, 3])
    world.add("b", [4, 5, 6, 7, 8])
    batch = prepare_inputs(world.states, {"b": 2, "a": 3}, world.buffers, check="full")
    assert batch.dummy_lens.dtype == np.int32
    assert batch.dummy_lens.tolist() == [5, 3]
    world.buffers["dummy_lens"][0] = 4
    with pytest.raises(PlanError, match="dummy_lens"):
        validate(batch)
    page = (Path(__file__).parents[2] / "docs" / "tensors.md").read_text(encoding="utf-8")
    assert "**`dummy_lens`** [B] int32 · `batch.dummy_lens`" in page
