"""The specification holds, and every one of its rules is needed."""

import inspect
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from batch_rig import every_backend
from batch_scenes import SCENES, Scene, scene

from foreword import batch
from foreword.batch import PlanError, validate
from foreword.batch.proof import validator
from foreword.batch.proof.spec import TENSORS, Level
from foreword.batch.step.layout import FIELDS, Scalars
from foreword.batch.step.tensors import BatchTensors, View

BUFFERS = {"num_blocks": "num_blocks"}  # where a tensor of the batch lies, if not under its own name


@every_backend
@pytest.mark.parametrize("name", SCENES)
def test_a_prepared_batch_keeps_every_rule(name, backend):
    made = scene(name, backend)
    validate(made.batch)


@pytest.mark.parametrize("name", SCENES)
def test_every_value_is_in_the_range_its_page_states(name):
    made = scene(name)
    step = validator.Step(made.batch)
    for spec in TENSORS:
        if spec.range is None:
            continue
        rule = validator._range(spec, *spec.range)
        for group, array in validator.arrays_of(spec, made.batch):
            got, expected, _ = rule.check(step, array, group)
            assert np.array_equal(got, expected), rule.name


def changed(value: np.generic) -> list[np.generic]:
    """Other values that the dtype can hold."""
    if value.dtype == np.bool_:
        return [~value]
    wanted = chain((value + d for d in (1, -1)), (-1, 10**6))
    return [v for v in map(value.dtype.type, wanted) if v != value]


@pytest.mark.one_in(13)
@pytest.mark.parametrize("name", SCENES)
def test_one_flipped_entry_of_a_batch_is_named(name):
    made = scene(name)
    for spec in TENSORS:
        if spec.level in (Level.SYSTEM, Level.STEP) or spec.attribute in ("explain", "function"):
            continue
        for group, view in validator.arrays_of(spec, made.batch):
            base = made.buffers[BUFFERS.get(spec.name, spec.name)]
            base = base[group] if spec.per_group else base
            for at in np.ndindex(view.shape):
                good = base[at]
                for bad in changed(good) if at[0] == 0 else changed(good)[:1]:
                    if spec.name == "draft_token_ids" and {int(good), int(bad)} == {0, -1}:
                        continue  # an unknown draft is staged as token 0: the id alone distinguishes them
                    base[at] = bad
                    with pytest.raises(PlanError) as caught:
                        validate(made.batch)
                    label = f"{spec.name}[{group}]" if spec.per_group else spec.name
                    if name == "cancelled" and caught.value.tensor == "expanded_idx_mapping" == f"expanded_{spec.name}":
                        continue  # only these two still hold the row of a removed request
                    assert caught.value.tensor == label, f"{label}{at}: {good} → {bad}: {caught.value}"
                    assert caught.value.index == (at if len(at) > 1 else at[0])
                    assert caught.value.got == bad.item()
                    assert caught.value.expected == good.item() or spec.name == "draft_token_ids"
                    assert caught.value.step == 42
                base[at] = good
    validate(made.batch)


def test_a_flipped_scalar_is_named():
    made = scene("mixed")
    good = made.batch.scalars
    for field in ("num_reqs", "num_tokens", "max_query_len", "max_seq_len", "attention_state"):
        index = Scalars._fields.index(field)
        for delta in (1, -1):
            if field == "attention_state" and delta > 0:
                continue  # 4 is SPEC_DECODING, covered by −1's like
            made.batch.scalars = (*good[:index], good[index] + delta, *good[index + 1 :])
            with pytest.raises(PlanError) as caught:
                validate(made.batch)
            assert caught.value.tensor == field, caught.value
    made.batch.scalars = good


def corruptions(rule: validator.Rule, array: np.ndarray):
    """Arrays that differ from a right one in one way: the dtype, the shape, or one value."""
    if rule.text.startswith("dtype"):
        yield array.astype({"bool": np.int8, "int32": np.int64, "int64": np.int32}.get(array.dtype.name, np.float64))
    elif rule.text.startswith("shape"):
        fill = rule.spec.padding if isinstance(rule.spec.padding, int) else 0
        yield np.pad(array, [(0, 1)] * array.ndim, constant_values=fill)
        yield np.append(array, array[-1:], axis=0)  # a padding value that is a symbol
    else:
        for at in np.ndindex(array.shape):
            for value in changed(array[at]):
                copy = array.copy()
                copy[at] = value
                yield copy


def caught(rules: list[validator.Rule], made: Scene) -> bool:
    try:
        validator.check_rules(rules, made.batch)
    except PlanError:
        return True
    return False


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", validator.RULES, ids=lambda rule: rule.name)
def test_a_rule_removed_lets_a_corruption_through(rule, monkeypatch):
    others = [r for r in validator.RULES if r.spec is rule.spec and r is not rule]
    for name in SCENES:
        made = scene(name)
        arrays = list(validator.arrays_of(rule.spec, made.batch))
        for i, (group, array) in enumerate(arrays):
            for bad in corruptions(rule, array):
                monkeypatch.setattr(
                    validator, "arrays_of", lambda *_, swap=(i, (group, bad)), arrays=arrays: [
                        swap[1] if j == swap[0] else a for j, a in enumerate(arrays)
                    ],
                )  # fmt: skip
                needed = caught([rule], made) and not caught(others, made)
                monkeypatch.undo()
                if needed:
                    return
    pytest.fail(f"nothing needs the rule {rule.name!r}")


def test_explained_tensors_are_checked(monkeypatch):
    made = scene("drafts")
    explained = [made.batch.explain(g) for g in range(2)]
    explained[0].block_offsets[3] += 1
    monkeypatch.setattr(validator, "token_sources", lambda batch, group: explained[group])
    with pytest.raises(PlanError) as caught:
        validate(made.batch)
    assert (caught.value.tensor, caught.value.index) == ("block_offsets[0]", 3)


def test_a_wrong_row_of_the_state_is_named_with_its_request():
    made = scene("mixed")
    row = made.states.row_of("waits")
    made.states.num_computed_tokens[row] = 4
    with pytest.raises(PlanError) as caught:
        validate(made.batch)
    assert (caught.value.tensor, caught.value.index) == ("states.num_computed_tokens", row)
    assert (caught.value.request, caught.value.expected, caught.value.got) == ("waits", 3, 4)


@pytest.mark.parametrize(("name", "value"), [("prompt_len", 9), ("lora_id", 3)])
def test_a_value_of_the_state_that_others_contradict_is_named(name, value):
    made = scene("mixed")
    row = made.states.row_of("waits")
    getattr(made.states, name)[row] = value
    with pytest.raises(PlanError) as caught:
        validate(made.batch)
    assert (caught.value.tensor, caught.value.index) == (f"states.{name}", row)


def test_two_tensors_that_agree_on_a_free_row_are_still_refused():
    made = scene("mixed")
    free = int(np.flatnonzero(~made.states.live)[0])
    made.buffers["idx_mapping"][1] = made.buffers["expanded_idx_mapping"][1] = free
    with pytest.raises(PlanError, match="holds no request"):
        validate(made.batch)


def test_a_committed_batch_is_no_longer_validated():
    made = scene("mixed")
    made.states.commit(made.batch, {"a": [1], "c": [2]})
    with pytest.raises(PlanError, match="before it is committed"):
        validate(made.batch)


def test_every_array_of_a_batch_is_specified():
    arrays = {
        name if name == "_attention_state" else name.removeprefix("_")
        for name, value in vars(BatchTensors).items()
        if type(value).__name__ in ("View", "Scalar") or name == "dcp_local_seq_lens"
    }
    specified = {spec.name for spec in TENSORS if spec.level is not Level.SYSTEM and spec.attribute is None}
    assert (arrays - {"_attention_state", "num_unresolved"}) | {"attention_state"} == specified


def test_every_array_of_a_row_is_specified():
    made = scene("embeddings")
    states = made.states
    specified = [a for s in TENSORS if s.level is Level.SYSTEM for _, a in validator.arrays_of(s, made.batch)]
    private = [states.sampling.is_set, *(t.content_id for t in states.block_tables)]  # what has changed, for caches
    for array in [*states._row_arrays(), states.token_ids]:
        assert any(np.shares_memory(array, other) for other in [*specified, *private])


def test_every_expression_of_the_reference_page_reads_its_tensor():
    """In each scene that has the tensor, and the page's shape and type are those of what the expression gives."""
    page = Path(__file__).parents[2] / "docs" / "tensors.md"
    entries = re.findall(r"^\*\*`(\w+)`\*\* (scalar|\[.*?\] \w+) · `(.*?)`", page.read_text(encoding="utf-8"), re.M)
    assert [name for name, _, _ in entries] == [spec.name for level in Level for spec in TENSORS if spec.level is level]
    specs = {spec.expression: spec for spec in TENSORS}
    read = set()
    for made in map(scene, SCENES):
        for name, kind, expression in entries:
            for g, array in validator.arrays_of(specs[expression], made.batch):
                value = np.asarray(eval(expression, vars(batch) | {"batch": made.batch, "states": made.states, "g": g}))
                assert np.array_equal(value, array), expression
                assert kind == "scalar" if value.ndim == 0 else kind.endswith(f"] {value.dtype}"), expression
                assert kind.count(",") + 1 == max(value.ndim, 1), expression
                assert specs[expression].name == name
                read.add(expression)
    assert read == {expression for _, _, expression in entries}


def test_the_comment_beside_each_view_is_the_table():
    source = inspect.getsource(BatchTensors)
    comments = dict(re.findall(r"^    (\w+) = View\[.*\]\(\)  # (.*)$", source, re.M))
    views = {name for name, value in vars(BatchTensors).items() if isinstance(value, View)}
    assert comments == {
        name: f"[{', '.join(FIELDS[name].shape)}] {FIELDS[name].dtype}"
        + (", one per KV group" if FIELDS[name].per_group else "")
        for name in views
    }
