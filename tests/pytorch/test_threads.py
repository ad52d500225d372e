"""The number of threads of PyTorch."""

import pytest

torch = pytest.importorskip("torch")

from foreword import machine
from foreword.executors.torch import options
from foreword.executors.torch.options import use_threads


@pytest.mark.parametrize(
    ("given", "variable", "before", "usual", "expected"),
    [
        (3, None, 1, 2, 3),
        (None, "3", 1, 2, 3),  # the variable goes before what PyTorch has
        (None, None, 4, 2, 2),  # a quota of a container
        (None, None, 1, 2, 1),  # a program that gave PyTorch fewer
        (5, "3", 1, 2, 5),
    ],
)
def test_threads_are_those_given_else_of_the_variable_else_as_many_as_are_usable(
    monkeypatch, given, variable, before, usual, expected
):
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(machine.VARIABLE, variable)
    monkeypatch.setattr(options, "default_threads", lambda: int(variable or usual))
    own = torch.get_num_threads()
    try:
        torch.set_num_threads(before)
        use_threads(given)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(own)
