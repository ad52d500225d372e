"""The keys of the installed transformers: every one is declared by the family that stands for it."""

import pytest

transformers = pytest.importorskip("transformers")

from foreword.models.families import TEXT_MODELS
from models.reference_keys import families
from models.test_model_keys import ALL, undeclared
from transformers_coverage.not_native import NOT_NATIVE

LACKED = {"minicpm", "exaone", "internlm2", "deepseek", "bailing_moe", "bailing_moe_v2"}  # by transformers


@pytest.mark.parametrize("model_type", [name for name in ALL if name in transformers.CONFIG_MAPPING])
def test_every_key_of_the_installed_transformers_is_declared(model_type):
    reference = families([model_type])[model_type]
    assert {"hidden_size", "n_embd", "n_layers", "d_model"} & set(reference["read"])
    assert undeclared(model_type, reference["defaults"]) == []


def test_transformers_has_every_family_but_these():
    assert {name for name in ALL if name not in transformers.CONFIG_MAPPING} == LACKED


def test_every_causal_type_of_the_installed_transformers_is_native_or_has_a_reason_why_not():
    types = {config.model_type for config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING}
    assert types <= {*ALL, *TEXT_MODELS, *NOT_NATIVE}
