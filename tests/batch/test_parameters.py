"""The table of sampling parameters, and the surfaces that are compared with it."""

import math
from functools import reduce
from operator import or_

import numpy as np
import pytest

from foreword.batch import RequestError, SamplingParams
from foreword.batch.state.sampling_columns import COLUMNS, GIVEN
from foreword.batch.values.parameters import CHANGING, RARE, Need
from foreword.batch.values.sampling_params import PARAMETERS
from foreword.native import available, native

NUMBERS = [row for row in PARAMETERS if row.type in ("int", "float")]
OTHERS = {"temperature": 0.0, "seed": 0, "logprobs": -1, "prompt_logprobs": -1}
"""The values of a row without parameters that are not the defaults of a request."""


@pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: row.name)
def test_a_default_is_accepted_and_is_what_a_row_without_parameters_holds(row):
    assert row.refusal(row.default) is None
    if row.column is not None:
        assert row.column.neutral == OTHERS.get(row.name, row.default)
        assert row.column.dtype in ((np.float32,) if row.type == "float" else (np.int32, np.int64))


@pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: row.name)
def test_a_meaning_is_a_sentence(row):
    assert row.help[0].isupper()
    assert row.help.endswith(".")


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.name)
def test_a_number_is_accepted_up_to_its_limits(row):
    def nearest(value, to):
        return math.nextafter(value, to) if row.type == "float" else value + int(math.copysign(1, to))

    accepted, refused = [], []
    for limit, beyond, inside in ((row.least, -math.inf, None), (row.most, math.inf, None), (row.above, None, 1.0)):
        if limit is not None:
            accepted.append(limit if inside is None else nearest(limit, inside))
            refused.append(limit if inside is not None else nearest(limit, beyond))
    assert accepted
    for value in accepted:
        assert row.refusal(value) is None
    for value in refused:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{row.name: value})
        assert caught.value.field == row.name
        assert caught.value.reason == f"must be {row.limits}"
        assert caught.value.fix == row.fix != ""


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.name)
def test_a_flag_is_no_number(row):
    for flag in (True, np.True_):
        with pytest.raises(RequestError, match=rf"^{row.name} = .*True_?: expected "):
            SamplingParams(**{row.name: flag})


@pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: row.name)
def test_none_is_accepted_where_the_type_says_so_and_is_an_empty_list_of_others(row):
    if row.optional or row.default == ():
        params = SamplingParams(**{row.name: None})
        params.check("r", 100)
        assert getattr(params, row.name) == (None if row.optional else ())
    else:
        with pytest.raises(RequestError, match=f"^{row.name} = None: expected "):
            SamplingParams(**{row.name: None})


def test_every_flag_follows_from_a_parameter():
    of_columns = reduce(or_, (column.need for column in GIVEN.values()), Need.GREEDY)
    of_others = reduce(or_, (row.need for row in PARAMETERS if row.need is not None))
    assert of_columns & of_others == 0
    assert of_columns | of_others == RARE | CHANGING | of_columns == reduce(or_, Need)
    setting = {column.need for column in GIVEN.values() if column.sets_need is not None}
    assert {column.need for column in GIVEN.values()} == setting


@pytest.mark.skipif(not available(), reason="native code is not built")
def test_native_code_reads_every_column_but_the_numbers_of_log_probabilities():
    expected = {name: np.dtype(dtype).name for name, (dtype, _) in COLUMNS.items()}
    for name in ("needs", "num_logprobs", "num_prompt_logprobs"):
        del expected[name]
    found = native.parameter_names()
    assert sorted(found) == sorted(expected.items())
