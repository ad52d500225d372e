"""llguidance: its tables of a vocabulary, and grammars compiled over them. This module is imported on first use,
because llguidance is optional.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from foreword.batch import StructuredOutputs
from foreword.sampling.masks import num_words
from foreword.structured.matcher import Matcher
from foreword.structured.source import grammar_text
from foreword.structured.vocabulary import Vocabulary

LIMITS = LLParserLimits(initial_lexer_fuel=300_000, max_lexer_states=50_000, verbose_errors=False)
"""Limits for grammars where llguidance's defaults allow seconds, or hundreds of megabytes, for one mask."""


class Backend:
    """Compile grammars over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tables = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_ids)
        self._end_ids = frozenset(vocabulary.eos_token_ids)
        self._special_tokens = vocabulary.special_tokens.keys()
        self._num_words = num_words(len(vocabulary.tokens))

    def compile(self, value: StructuredOutputs) -> Matcher:
        """Compile a grammar. Raise a ValueError with the reason if it cannot be compiled, or allows no first token.

        The first mask is computed here: it takes longest, and most grammars that exceed a limit exceed it there.
        """
        grammar = grammar_text(value, self._special_tokens)
        matcher = Matcher(LLMatcher(self._tables, grammar, log_level=0, limits=LIMITS), self._end_ids)
        matcher.fill_mask(np.empty(self._num_words, np.int32))
        return matcher
