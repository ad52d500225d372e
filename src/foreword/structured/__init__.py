"""Structured outputs: llguidance compiles grammars over the bytes of the tokenizer's tokens."""

from foreword.structured.compiler import GrammarCompiler

__all__ = ["GrammarCompiler"]
