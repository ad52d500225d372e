"""Chat templates: a list of messages rendered as the prompt format that the model was trained on.

A template is an untrusted program from the model's files, run on untrusted messages. It therefore runs in a sandbox
(`foreword.models.template_sandbox`), and every failure is a `ModelError` or a `RequestError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import meta

from foreword.errors import ModelError, RequestError
from foreword.models.chat_messages import WRITTEN_CALL, check_messages, check_tools, with_ids
from foreword.models.template_sandbox import Sandbox, TooMuchWork
from foreword.schemas import INVALID_JSON

_NAMED = re.compile(r"""(?<=['"])[A-Za-z0-9][A-Za-z0-9_.-]*(?=['"])""")
_TAKES_TEXT = re.compile(r"arguments\W{0,3}\s+is\s+string")
_ADDS_TEXT = re.compile(
    r"""(?:\.arguments|\[['"]arguments['"]\])\s*\+|\+\s*[\w.\[\]'"]+(?:\.arguments|\[['"]arguments['"]\])\s*-?\}"""
)
_WRITES_JSON = re.compile(r"""arguments(?:['"]\])?\s*\|\s*tojson""")
_PROBE = "Words of the system."


class InWords(Protocol):
    """Makes messages without tools of checked ones. takes_system: whether the template shows the system's."""

    def __call__(self, messages: Sequence[dict[str, Any]], *, takes_system: bool) -> list[dict[str, Any]]: ...


class ChatTemplate:
    """A compiled template. ``special_tokens`` (bos_token, eos_token, …) are variables of the template.

    Raise ModelError if the source is not a Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source, self._special_tokens = source, dict(special_tokens)
        self._takes_strings = "is string" in source
        self._takes_text_of_calls = _TAKES_TEXT.search(source) is not None
        # A template that does both adds the text of calls in contents of another kind.
        self._adds_text_of_calls = bool(_ADDS_TEXT.search(source)) and not _WRITES_JSON.search(source)
        self._shows_calls = "tool_calls" in source or "tojson" in source
        self._names = frozenset(_NAMED.findall(source))  # among them the roles that it compares with
        try:
            self._render = Sandbox(raise_exception=_refuse, strftime_now=_now).template(source)
        except Exception as error:  # raised by Jinja, or by Python's compiler for the code that Jinja writes
            where = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            reason = f"{type(error).__name__}: {error!s:.200}"
            fix = "Give the prompt as text, or use a newer file of the model"
            raise ModelError(f"the model's chat template is invalid{where}: {reason}. {fix}") from None

    @cached_property
    def takes_system(self) -> bool:
        """Return whether the template includes the text of system messages."""
        said = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hello"}]
        messages = said if self._takes_strings else [_as_parts(message) for message in said]
        try:
            return _PROBE in self._render(
                {**self._special_tokens, "messages": messages, "tools": None, "add_generation_prompt": True}
            )
        except Exception:  # a template can raise anything
            return False

    @property
    def written_call(self) -> str | None:
        """Return what the template writes after a question for an answer with `WRITTEN_CALL`; "" if it does not show
        the call, None if it refuses or fails.
        """
        return self._written_call[0]

    @cached_property
    def _written_call(self) -> tuple[str | None, str | None]:
        """Return `written_call`, and the content with which the template shows it: "", or None, which DeepSeek R1's
        tests for.
        """
        name, arguments = WRITTEN_CALL
        said = {"type": "integer", "description": name}
        schema = {"type": "object", "properties": dict.fromkeys(arguments, said), "required": [*arguments]}
        tool = {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
        asked = {"role": "user", "content": _PROBE}
        found = None if self._shows_calls else ""
        for content in ("", None) if self._shows_calls else ():
            messages: list[dict[str, Any]] = [asked, {"role": "assistant", "content": content, "tool_calls": [call]}]
            try:
                _, question, text = self._prompt(messages, [tool]).rpartition(_PROBE)
            except Exception:  # a template can raise anything
                continue
            if question and name in text:
                return text, content
            found = "" if question else found
        return found, ""

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads, whether or not it sets them too."""
        return frozenset(meta.find_undeclared_variables(Sandbox().parse(self._source)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        in_words: InWords | None = None,
        call_ids: str = "",
        add_generation_prompt: bool = True,
        media: Collection[str] = (),
        **extra: Any,
    ) -> str:
        """Return the prompt. ``extra``: further variables of the template. Raise RequestError if the template refuses
        or fails.

        in_words: makes messages without tools, calls and results of the checked ones. call_ids: the form of the ids of
        calls, see `with_ids`.
        media: kinds of media that the model takes, such as "image": messages may have parts {"type": "image"}. Contents
        are then lists of parts where they have such, and everywhere unless the template tells strings from lists.
        """
        checked = check_messages(messages, media=media, roles=self._names)
        if "developer" not in self._names:
            checked = [{**one, "role": "system"} if one["role"] == "developer" else one for one in checked]
        if in_words is not None:
            checked = in_words(checked, takes_system=self.takes_system)
        if call_ids:
            checked = with_ids(checked, call_ids)
        for i, message in enumerate(checked):
            if "tool_calls" in message and self.written_call == "":
                reason = "the model's chat template has no place for calls of tools"
                field = f"messages[{i}].tool_calls"
                raise RequestError(None, field, message["tool_calls"], reason, "Write them into the content")
        if any("tool_calls" in message for message in checked) and self._written_call[1] is None:
            checked = [{**one, "content": one["content"] or None} if "tool_calls" in one else one for one in checked]
        described = check_tools(tools)
        try:
            return self._prompt(checked, described, media, {**extra, "add_generation_prompt": add_generation_prompt})
        except _Refused as refusal:
            reason, fix = f"refuses them: {refusal!s:.1000}", "Change the messages accordingly"
        except TooMuchWork as error:
            reason, fix = f"does not end soon: {error}", "Give less text, or the prompt as text"
        except Exception as error:  # a template can raise anything; only this request fails
            reason = f"fails on them: {type(error).__name__}: {error!s:.1000}"
            fix = "Check roles, order and fields of the messages against the model's documentation"
        raise RequestError(None, "messages", _roles(messages), f"the model's chat template {reason}", fix)

    def _prompt(
        self,
        checked: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        media: Collection[str] = (),
        extra: Mapping[str, Any] = MappingProxyType({"add_generation_prompt": False}),
    ) -> str:
        """Return the prompt of checked messages and tools, see `render`. Errors are those of the template."""
        if media and not self._takes_strings:
            checked = [_as_parts(message) for message in checked]
        if not self._takes_text_of_calls:
            made = _as_text if self._adds_text_of_calls else _as_object
            checked = [_with_arguments(message, made) for message in checked]
        return self._render({**self._special_tokens, **extra, "messages": checked, "tools": tools})


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_arguments(message: dict[str, Any], made: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the message with arguments of calls that this makes of them."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [_with_made(call, made) for call in message["tool_calls"]]}


def _with_made(call: dict[str, Any], made: Callable[[Any], Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_made(call["function"], made)}
    return {**call, "arguments": made(call["arguments"])}


def _as_object(arguments: object) -> object:
    return {INVALID_JSON: arguments} if isinstance(arguments, str) else arguments


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _roles(messages: Sequence[Mapping[str, Any]]) -> list[object]:
    return [message["role"] for message in messages]


class _Refused(Exception):
    """A template called raise_exception."""


def _refuse(message: object = "") -> NoReturn:
    raise _Refused(str(message))


def _now(style: str) -> str:
    if len(style) > 100:
        raise ValueError("the format of strftime_now has more than 100 characters")
    return datetime.now().strftime(style)
