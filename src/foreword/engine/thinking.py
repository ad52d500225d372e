"""Resolve the thinking options of a conversation: variables that it reads, whether the model thinks, and how much."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from foreword.errors import RequestError
from foreword.names import advice

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of ``reasoning_effort``, OpenAI's names."""
USUAL_EFFORT = "medium"
"""The effort of OpenAI's interfaces by default: what a model does unasked."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables with which chat templates turn thinking on and off."""


@dataclass(frozen=True, slots=True)
class TemplateReads:
    """variables: that a chat template reads. thinks: whether it has the marks of a thinking part."""

    variables: Collection[str]
    thinks: bool

    @property
    def switch(self) -> str | None:
        """The variable that turns thinking on and off."""
        return next((name for name in SWITCHES if name in self.variables), None)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise RequestError for a variable that the template does not read and whose value asks for something."""
        for name, value in given.items():
            is_empty = value is None or (
                isinstance(value, bool | int | float | str | list | tuple | dict) and not value
            )
            asks = not is_empty or (value is False and name in SWITCHES and self.thinks)
            if asks and name not in self.variables:
                fix = advice(name, self.variables, "Leave it out.")
                raise RequestError(None, f"template.{name}", value, "the model's chat template does not read it", fix)

    def asked(self, effort: str | None, thinking: bool | None) -> dict[str, Any]:
        """Return the variables for ``reasoning_effort`` and ``thinking``; None asks for nothing.

        An effort is the variable of this name. Without it "medium" is what the model does unasked, "none" is no
        thinking, and others are refused with RequestError; so is thinking that the model does not have or always does.
        """
        found: dict[str, Any] = {}
        if effort is not None and "reasoning_effort" in self.variables:
            found["reasoning_effort"] = effort
        elif effort not in (None, "none", USUAL_EFFORT):
            usual = f"{USUAL_EFFORT!r}, which is what the model does unasked, or leave it out"
            fix = f"Give {usual}." if self.switch is None else f"Give 'none' for no thinking, {usual}."
            raise RequestError(None, "reasoning_effort", effort, "the model's chat template does not read it", fix)
        if effort == "none" and (self.switch is not None or not found):
            found |= self._switched("reasoning_effort", effort, False)
        return found if thinking is None else found | self._switched("thinking", thinking, thinking)

    def _switched(self, field: str, value: object, thinking: bool) -> dict[str, bool]:
        if self.switch is not None:
            return {self.switch: thinking}
        if thinking != self.thinks:
            reason = "the model always thinks" if self.thinks else "the model's chat template has no thinking"
            raise RequestError(None, field, value, reason, "Leave it out, or use another model.")
        return {}


def merged(given: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return variables of both kinds. Raise RequestError for one that is given and asked for by another value."""
    for name in given.keys() & asked.keys():
        if given[name] != asked[name]:
            reason = f"reasoning_effort or thinking asks for {asked[name]!r}"
            raise RequestError(None, f"template.{name}", given[name], reason, "Give one of them.")
    return {**given, **asked}
