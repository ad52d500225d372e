"""The sampling parameters that requests do not give: those that the model's files suggest, else the defaults here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreword.batch import SamplingParams
from foreword.errors import ModelError, RequestError
from foreword.models.generation_files import Suggestions

DEFAULT_PARAMS = SamplingParams(temperature=0.0, max_tokens=1024)
"""The parameters of requests and commands without parameters, if the model suggests none."""


def suggested_params(suggestions: Suggestions) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a file suggests.

    Raise ModelError for a value that they cannot have.
    """
    found = {}
    for name, (key, value) in suggestions.parameters().items():
        try:
            found[name] = getattr(SamplingParams(**{name: value}), name)
        except RequestError as error:
            fix = "Correct the file, or give generation_config='ignore'"
            raise ModelError(f"{suggestions.source}: {key} = {value!r:.80}: {error.reason}. {fix}") from None
    return found


def described(values: Mapping[str, Any]) -> str:
    """Return named values as text: "temperature = 0.6, top_k = 20"."""
    return ", ".join(
        f"{name} = {value:g}" if type(value) is float else f"{name} = {value}" for name, value in values.items()
    )
