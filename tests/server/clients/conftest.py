"""A server for clients that are installed by `make clients`; without one of them, its tests are skipped."""

import pytest
from server_rig import serving


@pytest.fixture(scope="module")
def server(talker):
    with serving(talker, api_key=("secret",), max_requests=64, engine={"max_model_len": 1024}) as running:
        yield running
