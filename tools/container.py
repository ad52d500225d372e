"""Build the image of the Dockerfile with buildah, and use it as `docker run` would, without a daemon.

    python tools/container.py                      make container
    python tools/container.py --base debian        on Debian's own Python, from its packages (mmdebstrap)

The second form is for machines that reach no registry of images. Programs of another user are not needed: buildah
works without root. The image must have no compiler, run as the user of the Dockerfile, refuse to start without a key,
answer, be healthy, and finish a request in progress after SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "container"
IMAGE, BASE = "localhost/foreword", "localhost/foreword-base"
KEY = "container-key"
URL = "http://127.0.0.1:8000"
MODEL = "smollm2"
PATIENCE = 600
"""Seconds that the first start may take, which downloads the model into the volume, and the end of the server."""
NETWORK = ("/etc/ssl/certs", "/etc/pip.conf", "/etc/xdg/pip")
"""How this machine reaches package indexes: certificates and settings of pip, where it has some of its own."""
DEBIAN = ("bookworm", "python3-dev,python3-venv,python-is-python3,ca-certificates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", choices=["debian"], help="the default is that of the Dockerfile")
    given = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    # Debian's buildah may choose vfs for users without root, which copies every layer: 18 GB for this image.
    os.environ.setdefault("STORAGE_DRIVER", "overlay")
    dockerfile = ROOT / "Dockerfile"
    if given.base:
        make_base()
        dockerfile = BUILD / "Dockerfile"
        dockerfile.write_text(re.sub(r"(?m)^FROM \S+", f"FROM {BASE}", (ROOT / "Dockerfile").read_text()))
    command = ["buildah", "build", "--layers", *isolation(), *volumes(), "--tag", IMAGE, "--file", dockerfile, ROOT]
    subprocess.run(command, check=True)
    config = json.loads(buildah("inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    # buildah 1.28 ends a run with an error if another one of the same container has ended meanwhile.
    with working_container() as serving, working_container() as asking:
        check(serving, asking, config)


@contextmanager
def working_container() -> Iterator[str]:
    container = buildah("from", IMAGE)
    try:
        yield container
    finally:
        buildah("rm", container)


def make_base() -> None:
    """Make an image of Debian's packages, with what the Dockerfile expects of its base: `python` and its headers."""
    if (
        subprocess.run(["buildah", "inspect", "--type", "image", BASE], capture_output=True, check=False).returncode
        == 0
    ):
        return
    release, packages = DEBIAN
    archive = BUILD / "base.tar"
    if not archive.exists():
        subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", release, archive],
                       check=True)  # fmt: skip
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, archive, "/")
    buildah("commit", "--quiet", "--rm", container, BASE)


def check(serving: str, asking: str, config: dict[str, Any]) -> None:
    command = [*config["Entrypoint"], *config["Cmd"]]
    assert run(asking, "id", "-u") == config["User"], "another user"
    assert run(asking, "sh", "-c", "command -v g++ cmake ninja || true") == "", "programs of the build are left"
    refused = subprocess.run(in_container(asking, command), capture_output=True, text=True, check=False)
    assert refused.returncode == 2, refused
    assert "key" in refused.stderr, refused.stderr
    health = probe(config)
    with served(serving, command) as (process, told):
        wait_until_ready(process)
        run(asking, *health)
        assert status("/v1/models", "") == 401, "a route is open without the key"
        assert "Paris" in answer("What is the capital of France?", 16)
        long = subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.PIPE, text=True)
        assert long.stdout is not None
        assert long.stdout.readline() == "first token\n"
        os.kill(int((told / "pid").read_text()), 15)
        assert long.stdout.readline() == "200 tokens\n", "a request in progress was lost"
        assert process.wait(PATIENCE) == 0, "SIGTERM does not end the server well"
    size = int(json.loads(buildah("images", "--json", IMAGE))[0]["size"].split()[0].split(".")[0])
    print(f"The image has about {size} MB; it answers, is healthy, needs a key, and ends without losing a request.")


LONG = f"""
import json, urllib.request
body = {{"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0,
        "stream_options": {{"include_usage": True}}}}
asked = urllib.request.Request("{URL}/v1/completions", json.dumps(body).encode(),
                               {{"Authorization": "Bearer {KEY}", "Content-Type": "application/json"}})
with urllib.request.urlopen(asked, timeout={PATIENCE}) as stream:
    first = True
    for line in stream:
        if line.startswith(b"data: {{"):
            chunk = json.loads(line[6:])
            if first:
                print("first token", flush=True)
            first = False
print(chunk["usage"]["completion_tokens"], "tokens", flush=True)
"""


@contextmanager
def served(container: str, command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run the server of the image, with a volume for models; yield it, and a folder that has its process id."""
    models = BUILD / "models"
    models.mkdir(exist_ok=True)
    begun = ["sh", "-c", 'echo $$ > /models/pid && exec "$@"', "sh", *command]
    variables = {"API_KEY": KEY, "DRAIN_TIMEOUT": PATIENCE}  # on a busy machine a request takes longer than 30 s
    options = (
        *(f"--env=FOREWORD_SERVE_{name}={value}" for name, value in variables.items()),
        *(f"--volume={models}:/models:U", *volumes()),
    )
    process = subprocess.Popen(in_container(container, begun, *options))
    try:
        yield process, models
    finally:
        process.kill()
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE
    while status("/ready", KEY) != 200:
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < until, "the server is not ready"
        time.sleep(0.5)


def status(path: str, key: str) -> int:
    asked = urllib.request.Request(URL + path, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(asked, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def answer(question: str, max_tokens: int) -> str:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=PATIENCE) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def probe(config: dict[str, Any]) -> list[str]:
    """Return the command of the Dockerfile's health check, which images of the OCI format do not keep."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    found = re.search(r"HEALTHCHECK .*CMD (\[.*\])", text)
    assert found is not None
    command: list[str] = json.loads(found[1])
    return command


def volumes() -> list[str]:
    return [f"--volume={path}:{path}:ro" for path in NETWORK if Path(path).exists()]


def isolation() -> list[str]:
    return ["--isolation=chroot"]


def in_container(container: str, command: list[str], *options: str) -> list[str]:
    return ["buildah", "run", *isolation(), *options, container, "--", *command]


def run(container: str, *command: str) -> str:
    return subprocess.run(in_container(container, list(command)), check=True, stdout=subprocess.PIPE,
                          text=True).stdout.strip()  # fmt: skip


def buildah(*arguments: object) -> str:
    """Run a command of buildah, and return what it prints."""
    command = ["buildah", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    main()
