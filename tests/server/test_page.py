"""docs/server.md has every setting and every metric; test_operations.py is about its routes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from server_rig import serving

from foreword.server.config import ServerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def test_every_setting_and_metric_is_on_the_page(talker):
    with serving(talker) as running:
        names = re.findall(r"# TYPE (?:vllm:)?(\S+)", running.get("/metrics").text)
    for name in (item.name for item in fields(ServerConfig)):
        assert f"`{name}`" in PAGE, name
    for name in names:
        assert name.startswith("process_") or f"`{name.removesuffix('_total')}`" in PAGE, name
