"""Show an answer while it is generated: its outputs, its growing text, and its speed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Self

from foreword import LLM, RequestOutput
from foreword.cli.terminal import Interrupt
from foreword.errors import ConfigError


def answer(outputs: Iterator[RequestOutput], interrupt: Interrupt) -> Iterator[RequestOutput]:
    """Yield the outputs of one request, up to the last before an interrupt, which ends the request."""
    for output in outputs:
        yield output
        if interrupt.pressed:
            return


def check_generates(llm: LLM, model: str) -> None:
    """Raise ConfigError for a model without a head for tokens, such as an encoder."""
    if not llm.model.generates:
        raise ConfigError(f"model {model!r:.80} generates no text: it is for `foreword embed`. Use another model")


CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters with which a text could control a terminal → the character that is shown instead."""


class Printer:
    """Prints a text as it grows, each new part at once, and ends its last line when ``with`` ends.

    strip: without white space around the whole. is_shown: False: prints nothing.
    """

    def __init__(self, *, strip: bool, is_shown: bool = True) -> None:
        self._strip, self._is_shown, self._shown = strip, is_shown, ""
        self._replaced = CONTROLS if sys.stdout.isatty() else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_shown and (self._shown or kind is None) and not self._shown.endswith("\n"):
            print(flush=True)

    def show(self, text: str) -> None:
        """Print the new part of the text."""
        if self._strip:
            text = text.strip()
        if self._is_shown and len(text) > len(self._shown):
            print(text[len(self._shown) :].translate(self._replaced), end="", flush=True)
            self._shown = text


def timings(llm: LLM, output: RequestOutput) -> dict[str, float | int | None]:
    """Return numbers of tokens, and speeds in tokens per second: of the prompt tokens that were computed, up to the
    first output token; and of the output tokens after the first. A speed is None if it was not measured.
    """
    metrics = output.metrics
    num_prompt, num_output = len(output.prompt_token_ids), sum(len(c.token_ids) for c in output.outputs)
    first, decoding = metrics.time_to_first_token, None
    if metrics.first_token_time is not None:
        decoding = (metrics.finished_time or llm.engine.clock()) - metrics.first_token_time
    num_later = num_output - len(output.outputs)
    return {
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": metrics.num_cached_tokens,
        "num_output_tokens": num_output,
        "time_to_first_token": first,
        "prompt_tokens_per_second": (num_prompt - metrics.num_cached_tokens) / first if first else None,
        "output_tokens_per_second": num_later / decoding if decoding and num_later > 0 else None,
    }


def summary(llm: LLM, output: RequestOutput) -> list[str]:
    """Return a summary in words, with the reason why the answer ended if the model did not end it."""
    measured = timings(llm, output)

    def speed(name: str) -> str:
        value = measured[f"{name}_tokens_per_second"]
        return "" if value is None else f", {value:.1f}/s"

    cached, first = measured["num_cached_tokens"], measured["time_to_first_token"]
    loaded = "".join(f", {count} from {tier}" for tier, count in output.metrics.loaded_tokens.items())
    reused = f" ({cached} reused{loaded})" if cached else ""
    parts = [
        f"{measured['num_prompt_tokens']} prompt tokens{reused}{speed('prompt')}",
        f"{measured['num_output_tokens']} output tokens{speed('output')}",
    ]
    if first is not None:
        parts.append(f"first after {first:.2f} s")
    return parts + endings(llm, output)


def endings(llm: LLM, output: RequestOutput) -> list[str]:
    """Finish reason → the text for a completion that the model itself did not end."""
    found = []
    reasons = {completion.finish_reason for completion in output.outputs}
    longest = max(len(completion.token_ids) for completion in output.outputs)
    if "length" in reasons:
        is_full = len(output.prompt_token_ids) + longest >= llm.engine.states.max_model_len
        limit = f"max_model_len = {llm.engine.states.max_model_len}" if is_full else f"max_tokens = {longest}"
        found.append(f"stopped at {limit}")
    if not output.finished:
        found.append("interrupted")
    return found
