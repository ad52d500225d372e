"""`tools/workflows.py` runs a job with values of its matrix, and refuses others by name."""

import pytest

workflows = pytest.importorskip("workflows", reason="needs PyYAML")
MATRIX = {"verb": ["vllm", "sglang"], "python": [3.11, "3.13"]}


def test_a_value_that_is_not_given_is_the_first_of_the_matrix():
    assert workflows.chosen_values([], MATRIX) == {"verb": "vllm", "python": "3.11"}
    assert workflows.chosen_values(["verb=sglang"], MATRIX) == {"verb": "sglang", "python": "3.11"}


def test_every_job_ends_after_a_time_of_its_own():
    assert [name for name, job in workflows.jobs() if "timeout-minutes" not in job] == []


@pytest.mark.parametrize(
    ("given", "matrix", "message"),
    [
        ("foo", MATRIX, "foo: must be NAME=VALUE"),
        ("foo", {}, "foo: must be NAME=VALUE with a name of the job's matrix, which is empty"),
        ("vreb=sglang", MATRIX, "vreb=sglang: must be NAME=VALUE with a name of the job's matrix, verb, python"),
        ("verb=other", MATRIX, "verb=other: the values of verb are vllm, sglang"),
        ("python=3.1", MATRIX, "python=3.1: the values of python are 3.11, 3.13"),
    ],
)
def test_what_the_matrix_does_not_have_is_refused_by_name(given, matrix, message):
    with pytest.raises(SystemExit) as refused:
        workflows.chosen_values([given], matrix)
    assert message in str(refused.value)
