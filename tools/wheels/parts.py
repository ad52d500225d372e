"""The list of parts (SBOM) of a release, as CycloneDX: what an installation with every extra of the server brings."""

from __future__ import annotations

import subprocess
import tempfile
import venv
from pathlib import Path

EXTRAS = "serve,hub,templates,events"


def write(python: Path, folder: Path) -> None:
    """Write a list for the wheel of this Python, and one for that of the layer. python: with cyclonedx-bom."""
    for wheel in sorted(folder.glob("*x86_64.whl")):
        name, _, rest = wheel.name.partition("-")
        target = folder / f"{name}-{rest.partition('-')[0]}.cdx.json"
        if target.exists():
            continue
        wanted = str(wheel) if name == "foreword_batch" else f"{wheel}[{EXTRAS}]"
        with tempfile.TemporaryDirectory() as environment:
            venv.create(environment, with_pip=True)
            other = Path(environment, "bin", "python")
            subprocess.run(
                [other, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted], check=True
            )
            subprocess.run([other, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools"], check=True)
            options = ["--output-reproducible", "--output-format", "JSON", "--output-file", target]
            subprocess.run([python, "-m", "cyclonedx_py", "environment", *options, other], check=True)
