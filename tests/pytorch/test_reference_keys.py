"""The keys of the installed transformers: every one is declared by the family that stands for it."""

import pytest

transformers = pytest.importorskip("transformers")

from models.reference_keys import families
from models.test_model_keys import ALL, undeclared

LACKED = {"minicpm"}  # by transformers


@pytest.mark.parametrize("model_type", [name for name in ALL if name in transformers.CONFIG_MAPPING])
def test_every_key_of_the_installed_transformers_is_declared(model_type):
    reference = families([model_type])[model_type]
    assert "hidden_size" in reference["read"]
    assert undeclared(model_type, reference["defaults"]) == []


def test_transformers_has_every_family_but_one():
    assert {name for name in ALL if name not in transformers.CONFIG_MAPPING} == LACKED
