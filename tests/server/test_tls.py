"""https, with a certificate made for the test."""

import shutil
import ssl
import subprocess

import httpx
import pytest
from server_rig import HI, frames_of, serving

OPENSSL = shutil.which("openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Certificate and key of 127.0.0.1, as files."""
    if OPENSSL is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "certificate.pem", folder / "key.pem"
    name = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-nodes", "-days", "2", "-keyout", key, "-out", made)
    subprocess.run([OPENSSL, "req", "-x509", "-newkey", "rsa:2048", *files, *name], check=True, capture_output=True)
    return made, key


def test_answers_and_streams_over_https(talker, certificate):
    made, key = certificate
    with serving(talker, tls_certificate=str(made), tls_key=str(key)) as running:
        assert running.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=made)
        with httpx.Client(base_url=running.url, verify=trusted, trust_env=False, timeout=60) as client:
            body = {"messages": HI, "max_tokens": 4, "temperature": 0}
            text = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            frames = frames_of(client.post("/v1/chat/completions", json={**body, "stream": True}).text)
            assert "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames) == text
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{running.url}/health", trust_env=False)
        running.check_nothing_is_left()
