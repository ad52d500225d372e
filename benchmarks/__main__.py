"""Measurements of single parts of Foreword.

python benchmarks --help
python benchmarks kernels --attention --json
"""

from __future__ import annotations

from parts.commands import app

from foreword.cli.app import run

if __name__ == "__main__":
    run(app)
