"""Convert conversations of items or content blocks to the messages that chat templates take."""

from __future__ import annotations

from typing import Any


class Conversation:
    """Messages in OpenAI's chat form, built piece by piece. Adjacent pieces of one role become one message.

    An assistant's reasoning, text and calls are one message; the result of each call is a message of its own.

    at: the path in the body from which a piece is made. origins: the path in the body of each message and of its parts,
    by their names in the messages.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []  # pieces of the last message: they are joined once, since there may be many
        self.origins: dict[str, str] = {}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages so far."""
        if self._reasoning:
            self._messages[-1]["reasoning_content"] = "".join(self._reasoning)
        return self._messages

    @property
    def last_role(self) -> str | None:
        return self._messages[-1]["role"] if self._messages else None

    def text(self, role: str, text: str, at: str) -> None:
        self._part(role, {"type": "text", "text": text}, at)

    def image(self, role: str, url: str, at: str) -> None:
        """Add an image. url: a data: URL, or the URL of a remote file."""
        self._part(role, {"type": "image_url", "image_url": {"url": url}}, at)

    def reasoning(self, text: str, at: str) -> None:
        message = self._of("assistant", at)
        self._reasoning.append(text)
        message["content"] = message["content"] or []

    def call(self, call_id: str, name: str, arguments: object, at: str) -> None:
        """Add a call. arguments: an object, its JSON text, or None. at: the path of the arguments."""
        calls = self._of("assistant", at).setdefault("tool_calls", [])
        self.origins[f"{self._last}.tool_calls[{len(calls)}].function.arguments"] = at
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, call_id: str, content: str, at: str) -> None:
        self._add({"role": "tool", "tool_call_id": call_id, "content": content}, at)

    @property
    def _last(self) -> str:
        """Return the name of the last message."""
        return f"messages[{len(self._messages) - 1}]"

    def _part(self, role: str, part: dict[str, Any], at: str) -> None:
        message = self._of(role, at)
        parts = message["content"] = message["content"] or []
        self.origins[f"{self._last}.content[{len(parts)}]"] = at
        parts.append(part)

    def _of(self, role: str, at: str) -> dict[str, Any]:
        """Return the last message if it has this role, else a new one."""
        if self.last_role != role:
            self._add({"role": role, "content": None}, at)
        return self._messages[-1]

    def _add(self, message: dict[str, Any], at: str) -> None:
        self._messages = self.messages
        self._reasoning = []
        self._messages.append(message)
        self.origins[self._last] = at
