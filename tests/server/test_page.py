"""docs/server.md has every metric; tests/test_pages.py is about its routes, and about the page of settings."""

import re
from pathlib import Path

from server_rig import serving

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def test_every_metric_is_on_the_page(talker):
    with serving(talker) as running:
        names = re.findall(r"# TYPE (?:vllm:)?(\S+)", running.get("/metrics").text)
    for name in names:
        assert name.startswith("process_") or f"`{name.removesuffix('_total')}`" in PAGE, name
