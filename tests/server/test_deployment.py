"""The files of the deployment page name what exists."""

import json
import re
from pathlib import Path

from server_rig import serving

from foreword.cli.options import read_toml
from foreword.engine.config import FLAT
from foreword.server.config import ServerConfig

DOCS = Path(__file__).parents[2] / "docs"


def test_every_metric_of_the_dashboard_is_served(talker):
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    names = {name.removesuffix("_bucket").removesuffix("_total") for name in re.findall(r"\w+:\w+", asked)}
    assert len(names) > 12
    with serving(talker) as server:
        text = server.get("/metrics").text
    served = {name.removesuffix("_total") for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}
    assert names <= served


def test_the_settings_of_the_page_are_known(tmp_path):
    page = (DOCS / "deployment.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "serve.toml").write_text(example)
    settings = read_toml(tmp_path / "serve.toml")
    settings.pop("model")
    assert ServerConfig(**settings).max_requests == 64
    fields = ServerConfig.__dataclass_fields__
    assert {flag.replace("-", "_") for flag in re.findall(r"--(kv-[a-z-]+)", page)} <= {*fields, *FLAT}
    assert {name.lower() for name in re.findall(r"FOREWORD_SERVE_(\w+)", page)} <= set(fields)
