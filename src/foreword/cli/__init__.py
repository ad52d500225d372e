"""The command line: one module per command."""

from foreword.cli.app import main

__all__ = ["main"]
