"""Errors of the library in the words of a command line."""

from __future__ import annotations

import re

from foreword.errors import ForewordError, RequestError, shown

_OF_LISTS = re.compile(r"prompts\[\d+\]")
_WITHOUT_NONE = (
    (r"\bUse None for none, (-1 for \w+)", r"Leave it out, or use \1"),
    (r"\bUse None for ([^,.]*)", r"Leave it out for \1"),
    (r",? or None for ", ", or leave it out for "),
    (r",? or None\b", ""),
)
"""Python's word for a value that is not given, and what a command line does in its place."""


def of_command(error: ForewordError) -> str:
    """Return the message of an error that ends a command."""
    text = of_request(error)
    for pattern, other in _WITHOUT_NONE:
        text = re.sub(pattern, other, text)
    return text


def of_chat(error: ForewordError) -> str:
    """Return the message of an error that a conversation goes on after, where "none" is typed for no value."""
    return re.sub(r"\bNone\b", "none", of_request(error))


def of_request(error: ForewordError) -> str:
    """Return the message of an error, without names of the library: of a request, its prompt and its tokens."""
    if not isinstance(error, RequestError):
        return str(error)
    name, reason = error.request_id or "", f"{error.reason}. {error.fix}"
    place = "" if not name or _OF_LISTS.fullmatch(name) else f"{name}: "
    if error.field == "prompt_token_ids":
        size = f" of {error.value}" if isinstance(error.value, str) else ""
        return f"{place}the prompt{size} {reason}"
    if error.field == "structured_outputs" and isinstance(error.value, dict) and "json" in error.value:
        return f"{place}--json-schema {shown(error.value['json'])}: {reason}"
    return f"{place}{error.field} = {shown(error.value)}: {reason}"
