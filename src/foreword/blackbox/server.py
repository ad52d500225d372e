"""Detect the abilities of a server: its models, routes, log-probabilities, and ways to compute a prompt without
the cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.blackbox.replay import Answer, Ask, Cold, ServerError, Target, body_of, fetch, post, post_aborted, words

FORMS = " {}", "{}"  # the form of a word: with a space before a letter, most tokenizers have one token per letter
PROBE_WORDS = 150
DEFAULT_MAX_WORDS = 1024


@dataclass(frozen=True, slots=True)
class Server:
    """The abilities of a server.

    models: names of models; all but the first may be adapters of it. max_words: words of the longest prompt.
    num_extra, tokens_per_word: a prompt of w words has num_extra + tokens_per_word · w tokens.
    reports_hits: whether usage has the number of cached tokens of a prompt. has_choices: whether it supports n > 1.
    salts_are_promised: whether its OpenAPI description has `cache_salt`. notes: sentences about limits of the search.
    """

    target: Target
    models: tuple[str, ...]
    max_words: int
    num_extra: int
    tokens_per_word: float
    takes_salts: bool
    salts_are_promised: bool
    reports_hits: bool
    has_choices: bool
    has_streams: bool
    notes: tuple[str, ...]


def examine(target: Target, models: Sequence[str] = (), max_words: int = DEFAULT_MAX_WORDS) -> Server:
    """Detect the abilities of a server. Raise ServerError if it cannot be reached, refuses, or has no route for
    completions.

    target.route and target.top are tried first. Chats are used if there are no completions, and no log-probabilities if
    they are refused.
    """
    return _Examination(target, models).run(max_words)


class _Examination:
    def __init__(self, target: Target, models: Sequence[str]) -> None:
        self.target, self.models, self.notes = target, tuple(models), list[str]()
        self._copy = f"examine {random.random()}"

    def run(self, max_words: int) -> Server:
        longest = self._list_models()
        self._find_route()
        num_extra, per_word, first = self._measure_words()
        if longest:
            max_words = min(max_words, int((longest - num_extra) / per_word) - 80)
        if max_words < 40:
            raise ServerError("prompts are too short", f"the server takes {max_words} words; at least 40 are needed")
        if not first.choices[0].tokens:
            self.notes.append("The server gives no log-probabilities: only answers whose text differs are found.")
        takes_salts, reports_hits = self._find_cold()
        return Server(
            target=self.target,
            models=self.models,
            max_words=max_words,
            num_extra=num_extra,
            tokens_per_word=per_word,
            takes_salts=takes_salts,
            salts_are_promised=takes_salts and self._promises_salts(),
            reports_hits=reports_hits,
            has_choices=self._find_choices(),
            has_streams=self._find_streams(),
            notes=tuple(self.notes),
        )

    def _ask(self, num_words: int, segment: int = 0, **fields: object) -> Answer:
        text = words(self.target, self._copy, segment, num_words)
        return post(
            self.target, {**body_of(self.target, self._copy, Ask((), 2, model=self.models[0]), [text]), **fields}
        )

    def _list_models(self) -> int:
        """Read the names of the models, unless they are given. Return the length of the longest request, 0 if it is not
        known.
        """
        try:
            listed = fetch(self.target, "GET", "/v1/models").get("data")
        except ServerError as error:
            if error.status in (0, 401, 403) or not self.models:
                raise
            return 0
        entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        self.models = self.models or tuple(str(one.get("id", "")) for one in entries)[:4]
        if not self.models:
            raise ServerError("no models", "/v1/models lists none; give one with --model")
        lengths = [one["max_model_len"] for one in entries if isinstance(one.get("max_model_len"), int)]
        return min(lengths, default=0)

    def _find_route(self) -> None:
        """Choose the route and the log-probabilities: the preferred ones, or else those that the server supports."""
        other = replace(self.target, route="completions" if self.target.route == "chat" else "chat")
        wishes = [self.target, replace(self.target, top=1), replace(self.target, top=0)]
        wishes += [other, replace(other, top=1), replace(other, top=0)]
        failure: ServerError | None = None
        for wish in wishes:
            self.target = wish
            try:
                answer = self._ask(8)
            except ServerError as error:
                if error.status not in (400, 404, 405, 422, 500, 501):
                    raise
                failure = failure or error
                continue
            if wish.top and not answer.choices[0].tokens:
                continue
            if wish.route == other.route:
                self.notes.append(f"The server refuses the other route: {failure}.")
            return
        raise failure or ServerError("no route of completions")

    def _measure_words(self) -> tuple[int, float, Answer]:
        """Find a form of words with one token each. Return the number of other tokens, the tokens per word, and an
        answer.
        """
        rates: list[tuple[float, float, str, Answer]] = []
        for form in FORMS:
            self.target = replace(self.target, word=form)
            short, middle, long = (self._ask(count) for count in (8, 24, 40))
            if long.num_prompt < 0:
                self.notes.append("The server counts no tokens: a word is taken for one token of a prompt.")
                return 0, 1.0, long
            rate = (long.num_prompt - short.num_prompt) / 32
            bend = abs(long.num_prompt - 2 * middle.num_prompt + short.num_prompt)
            rates.append((bend + abs(rate - 1), rate, form, long))
            if rates[-1][0] == 0:
                break
        error, rate, form, long = min(rates, key=lambda one: one[0])
        self.target = replace(self.target, word=form)
        if rate <= 0:
            raise ServerError("wrong numbers of tokens", "usage.prompt_tokens does not grow with the prompt")
        if error:
            self.notes.append(f"A word has {rate:.2f} tokens: not every border of blocks is met exactly.")
        return round(long.num_prompt - 40 * rate), rate, long

    def _find_cold(self) -> tuple[bool, bool]:
        """Find a way to compute a prompt without the cache, and whether salts are supported and hits are reported."""
        takes_salts = True
        try:
            self._ask(PROBE_WORDS, 1, cache_salt="one")
            again = self._ask(PROBE_WORDS, 1, cache_salt="one")
        except ServerError as error:
            if error.status not in (400, 422):
                raise
            takes_salts = False
            self._ask(PROBE_WORDS, 1)
            again = self._ask(PROBE_WORDS, 1)
        reports_hits = again.num_cached > 0
        ways: dict[Cold, dict[str, object]] = {"cache_salt": {"cache_salt": "two"}} if takes_salts else {}
        ways["cache_prompt"] = {"cache_prompt": False}
        if self.target.route == "completions" and self.target.top:
            ways["echo"] = {"echo": True}
        if not reports_hits:
            self.notes.append("The server reports no cache hits: there may be no prefix cache, or no counts of it.")
        for cold, fields in ways.items():
            try:
                if reports_hits:
                    self._ask(PROBE_WORDS, 1)  # the prompt is in the cache without a salt, too
                    self._ask(PROBE_WORDS, 1)
                found = self._ask(PROBE_WORDS, 1, **fields)
            except ServerError as error:
                if error.status not in (400, 422):
                    raise
                continue
            if not reports_hits or found.num_cached == 0:
                certain = reports_hits or (cold == "cache_salt" and self._promises_salts())
                self.target = replace(self.target, cold=cold, cold_is_certain=certain)
                break
        if not self.target.cold_is_certain:
            self.notes.append(
                "Nothing shows that the server computes a prompt without its cache (cache_salt, cache_prompt, echo): "
                "a prompt that is wrong the first time it is sent is not found."
            )
        return takes_salts, reports_hits

    def _promises_salts(self) -> bool:
        try:
            return "cache_salt" in str(fetch(self.target, "GET", "/openapi.json"))
        except ServerError:
            return False

    def _find_choices(self) -> bool:
        for drawn in (False, True):
            try:
                answer = self._ask(8, n=2, temperature=int(drawn))
            except ServerError as error:
                if error.status not in (400, 422):
                    raise
                continue
            if len(answer.choices) == 2 and not (drawn and not self.target.top):
                self.target = replace(self.target, sampled_choices=drawn)
                return True
        return False

    def _find_streams(self) -> bool:
        try:
            text = words(self.target, self._copy, 2, 8)
            ask = Ask((), 2, model=self.models[0], abort_after=1)
            post_aborted(self.target, body_of(self.target, self._copy, ask, [text]), 9)
        except ServerError as error:
            self.notes.append(f"Streams are not tried: {error}.")
            return False
        return True
