"""The page of a token's life names functions that exist."""

import re

import pytest

from docpages import ROOT
from docpages.life import stops


@pytest.mark.parametrize("stop", stops(), ids=lambda stop: stop.title)
def test_the_function_of_a_stop_is_in_its_file(stop):
    assert re.search(rf"^ *def {stop.function}\(", (ROOT / stop.file).read_text(encoding="utf-8"), re.M)
