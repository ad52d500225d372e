"""Requests that schemathesis makes from /openapi.json, good and bad ones."""

import subprocess
import sys

import pytest
from server_rig import serving

CONFIG = """
[checks]
positive_data_acceptance.enabled = false  # ranges, chat templates and grammars refuse more than the schemas
not_a_server_error.expected-statuses = ["2xx", "4xx", 504]  # 504: a deadline in the request
"""


def test_no_request_makes_a_server_error_and_every_answer_is_as_described(talker, tmp_path):
    pytest.importorskip("schemathesis")
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with serving(talker, api_key=("secret",), engine={"max_model_len": 128}) as running:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{running.url}/openapi.json"),
            *("--header", "Authorization: Bearer secret", "--max-examples", "30", "--max-time", "60"),
            *("--request-timeout", "30", "--continue-on-failure"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-10000:] + done.stderr
        running.check_nothing_is_left()
