"""Faults of a server's prefix cache, found from outside: `foreword fuzz` (docs/fuzz.md).

server     what the server offers, asked once
noise      how far answers to equal prompts are apart without a fault
scenarios  conversations whose answers are right only if the cache is
replay     requests, answers, differences; also the script of a finding
shrink     the smallest conversation that still shows a difference
fuzzer     the search
"""

from foreword.blackbox.fuzzer import BLOCK_SIZES, Finding, Fuzzer, Report
from foreword.blackbox.replay import Route, ServerError, Target, base_of
from foreword.blackbox.scenarios import SCENARIOS
from foreword.blackbox.script import described, script
from foreword.blackbox.server import DEFAULT_MAX_WORDS, Server, examine

__all__ = [
    "BLOCK_SIZES", "DEFAULT_MAX_WORDS", "SCENARIOS", "Finding", "Fuzzer", "Report", "Route", "Server", "ServerError",
    "Target", "base_of", "described", "examine", "script",
]  # fmt: skip
