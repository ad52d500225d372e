"""Values that no option of a command can use."""

import inspect
from typing import get_args

import typer


def options(function):
    """(option, types of its value, all that is declared of it) of a command."""
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind, info, *_ = (*get_args(parameter.annotation), None, None)
        if isinstance(info, typer.models.OptionInfo):
            given = [text for text in (info.default, *(info.param_decls or ())) if str(text).startswith("--")]
            flag, kinds = (given or [f"--{name.replace('_', '-')}"])[0], {kind, *get_args(kind)}
            yield flag, kinds, (flag, frozenset(kinds), info.help, info.min, info.max, info.metavar)


def assert_refused(call, command, words, tried):
    """Every (words, option, value) ends with status 2 and names its option; ``call`` returns the status and error."""
    for _, option, value in tried:
        status, error = call(*command, *words, option, value)
        assert status == 2, (option, value)
        assert "Traceback" not in error
        assert "none.gguf" not in error, (option, value)
        assert option in error or option[2:].replace("-", "_") in error or "CostModel" in error, error


def numbers(commands):
    """(words, option, value) for each option of these commands that takes a number, and values that are none or out of
    any range. An option that an earlier command has too, with the same type, range and help, is tried with one value.
    """
    seen = set()
    for words, function in commands:
        for option, kinds, declared in options(function):
            wrong = ["1.5", "9" * 20] if int in kinds else ["nan", "inf", "1e400"] if float in kinds else []
            values = wrong and ["", "x", "-1", "9" * 5000, *wrong]
            for value in ["x"] if declared in seen and wrong else values:
                yield words, option, value
            seen.add(declared)
