"""The command line: one module a command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `foreword`. An error made on purpose is one line and exit status 2, not a traceback."""
    from foreword.cli.app import app
    from foreword.errors import ForewordError

    try:
        app()
    except ForewordError as error:
        print(f"foreword: {error}", file=sys.stderr)
        sys.exit(2)
