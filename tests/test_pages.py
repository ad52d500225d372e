"""Files that are made from tables are those that their generators make."""

import json

import pytest

from docpages import PAGES, ROOT, written
from docpages.model_types import RECORD
from foreword.models.families import FAMILIES, TEXT_MODELS
from transformers_coverage.not_native import NOT_NATIVE


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_file_is_up_to_date(name):
    assert (ROOT / name).read_text(encoding="utf-8") == written(name), "run `make pages`"


def test_every_causal_type_of_transformers_is_native_or_has_a_reason_why_not():
    types, native = json.loads(RECORD.read_text())["types"].keys(), {*FAMILIES, *TEXT_MODELS}
    assert NOT_NATIVE.keys() == types - native
