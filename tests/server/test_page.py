"""docs/server.md has every route, every setting and every metric."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from server_rig import serving

from foreword.cli.serve import ENGINE
from foreword.server.access import ADMIN
from foreword.server.app import routes_of
from foreword.server.config import ServerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def test_every_route_setting_and_metric_is_on_the_page(talker):
    with serving(talker) as running:
        paths = [route.path for route in routes_of(running.context)]
        names = re.findall(r"# TYPE (?:vllm:)?(\S+)", running.get("/metrics").text)
    for name in [*paths, *(item.name for item in fields(ServerConfig)), *ENGINE]:
        assert f"`{name.replace(':path', '')}`" in PAGE or f" {name.replace(':path', '')}`" in PAGE, name
    for name in names:
        assert name.startswith("process_") or f"`{name.removesuffix('_total')}`" in PAGE, name


def test_the_routes_of_the_admin_are_marked():
    rows = [line for line in PAGE.splitlines() if "(admin)" in line]
    assert {path for path in ADMIN if any(f"{path}`" in row for row in rows)} == ADMIN
