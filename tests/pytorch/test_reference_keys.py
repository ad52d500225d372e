"""The keys of the installed transformers: every one is declared by the family that stands for it."""

import pytest

pytest.importorskip("transformers")

from models.reference_keys import families
from models.test_model_keys import ALL, undeclared


@pytest.mark.parametrize("model_type", ALL)
def test_every_key_of_the_installed_transformers_is_declared(model_type):
    reference = families([model_type])[model_type]
    assert "hidden_size" in reference["read"]
    assert undeclared(model_type, reference["defaults"]) == []
