"""Write a finding as a Python script, and describe it in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from foreword.blackbox import replay
from foreword.blackbox.fuzzer import Finding
from foreword.blackbox.replay import Ask, Conversation, Target

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def script(target: Target, finding: Finding) -> str:
    """Return a script that needs only the standard library and holds a finding's conversation. It exits with 1 if an
    answer is wrong.
    """
    waves = "".join(f"        ({''.join(f'{ask!r}, ' for ask in wave)}),\n" for wave in finding.conversation.waves)
    return (
        f"{Path(replay.__file__).read_text(encoding='utf-8')}\n\n"
        f"TARGET = {target!r}\n"
        f"CONVERSATION = Conversation(\n    (\n{waves}    )\n)\n\n"
        f'if __name__ == "__main__":\n'
        f"    sys.exit(main(TARGET, CONVERSATION, {finding.number}, leaks={finding.difference is None}))\n"
    )


def described(conversation: Conversation, number: int) -> Iterator[str]:
    """Yield a line per request: its number, the segments and words of its prompt, and its options."""
    letters: dict[int, str] = {}
    i = 0
    for wave in conversation.waves:
        for j, ask in enumerate(wave):
            prompt = " ".join(f"{_letter(letters, segment)}[{count}]" for segment, count in ask.parts)
            if ask.continues >= 0:
                prompt = f"(prompt and answer of {ask.continues}) {prompt}"
            mark = "  ← wrong" if i == number else ""
            together = f" (with {i - j})" if j else ""
            yield f"{i}{together}: {prompt}; {', '.join(_wishes(ask))}{mark}"
            i += 1


def _letter(letters: dict[int, str], segment: int) -> str:
    return letters.setdefault(segment, LETTERS[len(letters) % 26] + str(len(letters) // 26 or ""))


def _wishes(ask: Ask) -> Iterator[str]:
    yield f"max_tokens {ask.max_tokens}"
    if ask.n > 1:
        yield f"n = {ask.n}"
    if ask.salt:
        yield f"salt {ask.salt!r}"
    if ask.abort_after:
        yield f"closed after event {ask.abort_after}"
    if ask.model:
        yield f"model {ask.model!r}"
