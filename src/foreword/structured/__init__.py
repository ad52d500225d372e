"""Structured outputs: grammars compiled by llguidance from the tokenizer's own token bytes."""

from foreword.structured.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
