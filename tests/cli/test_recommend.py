"""`foreword models recommend`: which models fit."""

import json

import pytest
from typer.testing import CliRunner

from foreword.cli.models import models
from foreword.models.recommended import RECOMMENDED, fitting


def shown(*arguments):
    return CliRunner().invoke(models, ["recommend", *arguments])


def test_the_models_that_fit_are_listed_the_largest_first():
    lines = [json.loads(line) for line in shown("--memory", "4", "--json").stdout.splitlines()]
    want = [model.model for model in RECOMMENDED if model.size + 2**31 <= 4e9]
    assert [line["model"] for line in lines] == want[::-1]
    assert all(line["most_tokens_per_second"] is None or line["most_tokens_per_second"] > 0 for line in lines)


def test_the_default_is_called_what_it_is():
    result = shown("--memory", "64")
    assert "smollm2, a demonstration: small, fast and often wrong" in result.stdout
    assert all(model.model in result.stdout for model in RECOMMENDED)


def test_too_little_memory_names_the_smaller_models():
    assert "None fits" in shown("--memory", "1").stdout
    assert shown("--memory", "0").exit_code == 2


def test_they_are_in_the_order_of_their_sizes():
    assert [model.size for model in RECOMMENDED] == sorted(model.size for model in RECOMMENDED)
    assert [*fitting(float("inf"))] == [*RECOMMENDED[::-1]]


@pytest.mark.parametrize("model", RECOMMENDED)
def test_the_bound_of_speed_is_that_of_the_weights_that_a_token_reads(model):
    assert model.most_tokens_per_second(1e10) == 1e10 / (model.active or model.size)
