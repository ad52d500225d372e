"""`foreword run --json-schema` answers in the form of a file's schema."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreword.cli.app import app

SCHEMA = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}}, "required": ["capital"],
          "additionalProperties": False}  # fmt: skip


@pytest.mark.model
def test_the_answer_follows_the_schema(smollm2_path: Path, tmp_path: Path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    arguments = ["run", "The capital of France?", "--model", str(smollm2_path), "--json-schema", str(schema)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert json.loads(result.stdout) in ({"capital": "Paris"}, {"capital": "Rome"})
