"""The hashes without OpenSSL are those of hashlib."""

import hashlib

import pytest

from foreword.hashes import blake2b, sha256, sha256_of_files


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 40])
def test_hashes_are_those_of_hashlib(data):
    assert sha256(data).hexdigest() == hashlib.sha256(data).hexdigest()
    options = {"digest_size": 16, "key": b"key", "salt": b"salt"}
    assert blake2b(data, **options).digest() == hashlib.blake2b(data, **options).digest()
    of_files = sha256_of_files()
    of_files.update(data)
    assert of_files.digest() == hashlib.sha256(data).digest()
