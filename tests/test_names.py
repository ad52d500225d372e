"""Advice about names that clients choose."""

from foreword.errors import RequestError
from foreword.names import advice


def test_an_unknown_name_of_any_length_is_refused_in_few_words():
    name = "stopp" * 10**6
    error = RequestError(None, name, 1, "is unknown", advice(name, ["stop"], "Leave it out."))
    assert len(str(error)) + len(error.field) < 500
    assert str(error).endswith("Leave it out.")
