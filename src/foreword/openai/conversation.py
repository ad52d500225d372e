"""Conversations given as items or content blocks, gathered into the messages that chat templates take."""

from __future__ import annotations

from typing import Any


class Conversation:
    """Messages in OpenAI's chat form, made piece by piece. Neighbouring pieces of one role are one message.

    An assistant's reasoning, text and calls are one message; the result of each call is a message of its own.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    @property
    def last_role(self) -> str | None:
        return self.messages[-1]["role"] if self.messages else None

    def text(self, role: str, text: str) -> None:
        message = self._of(role)
        message["content"] = [*(message["content"] or ()), {"type": "text", "text": text}]

    def image(self, role: str, url: str) -> None:
        """url: a data: URL, or one of another machine."""
        message = self._of(role)
        message["content"] = [*(message["content"] or ()), {"type": "image_url", "image_url": {"url": url}}]

    def reasoning(self, text: str) -> None:
        message = self._of("assistant")
        message["reasoning_content"] = message.get("reasoning_content", "") + text
        message["content"] = message["content"] or []

    def call(self, call_id: str, name: str, arguments: object) -> None:
        """arguments: an object, or its JSON text."""
        function = {"name": name, "arguments": arguments}
        self._of("assistant").setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": function}
        )

    def result(self, call_id: str, content: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _of(self, role: str) -> dict[str, Any]:
        """The last message if it is of this role, else a new one."""
        if self.last_role != role:
            self.messages.append({"role": role, "content": None})
        return self.messages[-1]
