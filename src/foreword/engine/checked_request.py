"""A request that the engine has checked, with what its outputs need to become those of its user."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foreword.engine.outputs import RequestOutput
from foreword.engine.request_group import RequestGroup

if TYPE_CHECKING:
    from foreword.engine.chat import ChatReader  # imported only for types: it imports the formats of messages


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A checked request for the prompt at ``index`` of the user's list. reader: reads the answer of a conversation."""

    group: RequestGroup
    reader: ChatReader | None = None
    index: int = 0

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return an output of the engine in the form that the user gets."""
        output = replace(output, prompt_index=self.index) if self.index else output
        return output if self.reader is None else self.reader.read(output)
