"""Every method of quantisation that transformers names is read, or refused by its name."""

import pytest

from foreword.errors import ModelError
from foreword.models.quantized.checkpoint import REFUSED
from models.test_quantized import A, read

pytest.importorskip("transformers")
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

METHODS = sorted({name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZATION_CONFIG_MAPPING})


@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_transformers_is_read_or_refused_by_name(tmp_path, method):
    """A file of another method never fits the one that is read."""
    with pytest.raises(ModelError) as raised:
        read(tmp_path, {"quant_method": method}, A)
    is_refused = f"quant_method is {method!r}, which is not supported" in str(raised.value)
    assert is_refused == (method in REFUSED)


def test_no_other_methods_are_on_the_list():
    assert set(REFUSED) <= set(METHODS)
