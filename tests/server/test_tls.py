"""https, with a certificate made for the test."""

import shutil
import ssl
import subprocess

import httpx
import pytest
from server_rig import HI, frames_of, serving

from foreword.errors import ConfigError
from foreword.server.config import ServerConfig

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
            httpx.get(f"{running.url}/health", trust_env=False, timeout=60)
        running.check_nothing_is_left()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("certificate_file", "key_file", "message"),
    [
        ("none", "key", "tls_certificate='none': cannot be read (No such file or directory)"),
        ("cert", "none", "tls_key='none': cannot be read (No such file or directory)"),
        ("key", "key", "tls_certificate='key': holds no certificate in PEM form"),
        ("cert", "cert", "tls_key='cert': holds no private key in PEM form"),
        ("cert", "other", "tls_certificate='cert', tls_key='other': the key is not that of the certificate"),
        ("cert", "locked", "tls_key='locked': is encrypted"),
        ("cert", "damaged", "tls_certificate='cert', tls_key='damaged': one of them is damaged"),
    ],
)
def test_files_that_cannot_be_used_are_named(certificate, tmp_path, monkeypatch, certificate_file, key_file, message):
    monkeypatch.chdir(tmp_path)
    made, key = certificate
    shutil.copy(made, "cert")
    shutil.copy(key, "key")
    rsa = [OPENSSL, "genrsa", "-out", "other", "2048"]
    locked = [OPENSSL, "rsa", "-aes256", "-passout", "pass:x", "-in", "key", "-out", "locked"]
    for command in (rsa, locked):
        subprocess.run(command, check=True, capture_output=True)
    lines = key.read_text().splitlines()
    (tmp_path / "damaged").write_text("\n".join([lines[0], *lines[5:]]))
    config = ServerConfig(tls_certificate=certificate_file, tls_key=key_file)
    with pytest.raises(ConfigError) as error:
        config.check_files()
    assert str(error.value).startswith(message)
