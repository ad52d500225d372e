"""The files of the deployment page name what exists."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from server_rig import serving
from several_rig import serving_several

from foreword.cli.app import app
from foreword.cli.options import read_toml
from foreword.cluster.metrics import Page, replica_metrics, responses_by_status
from foreword.engine.config import FLAT
from foreword.server.config import ServerConfig
from foreword.server.operations import OPERATIONS
from foreword.server.served import ServedModel

ROOT = Path(__file__).parents[2]
DOCS, DEPLOY = ROOT / "docs", ROOT / "deploy"


def test_every_metric_of_the_dashboard_and_of_the_alerts_is_served(talker):
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    asked += re.sub("#.*", "", (DEPLOY / "prometheus-alerts.yaml").read_text())
    names = {name.removesuffix("_bucket").removesuffix("_total") for name in re.findall(r"\w+:\w+", asked)}
    assert len(names) > 12
    several_models = serving_several([ServedModel(model=str(talker), names=("a",))], load_on_demand=True)
    with serving(talker) as server, several_models as several:
        text = server.get("/metrics").text + several.get("/metrics").text
    of_replicas = Page([responses_by_status(Counter([200])), *replica_metrics({0: 1}, [0])])
    text += of_replicas.text().decode()
    served = {name.removesuffix("_total") for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}
    assert names <= served


def test_prometheus_gives_a_key_and_its_jobs_are_those_of_the_rules():
    """A job without a key gets status 401 from a server with keys, and a rule for another job never applies."""
    text = (DEPLOY / "prometheus.yaml").read_text()
    jobs = re.findall(r"job_name: (\S+)\n    authorization: {credentials_file", text)
    assert len(jobs) == text.count("job_name") == 2
    rules = re.findall(r'up{job=~"(.*?)"}', (DEPLOY / "prometheus-alerts.yaml").read_text())
    assert rules
    assert all(re.fullmatch(rule, job) for rule in rules for job in jobs)
    assert OPERATIONS.target("GET", "/metrics").access == "key"
    manifest = (DEPLOY / "kubernetes.yaml").read_text()
    assert re.findall(r"names: \[([\w-]+)\.", text)[0] in re.findall(r"name: (\S+)", manifest)


def test_the_manifest_starts_as_many_threads_as_processors_are_requested():
    text = (DEPLOY / "kubernetes.yaml").read_text()
    (threads,) = re.findall(r'--num-threads,\s*"(\d+)"', text)
    (processors,) = re.findall(r'requests: {cpu: "(\d+)"', text)
    assert threads == processors


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


def test_the_manifest_starts_a_server_that_accepts_its_options_and_asks_public_routes():
    text = (DEPLOY / "kubernetes.yaml").read_text()
    (arguments,) = re.findall(r"args: \[(.*?)\]", text, re.DOTALL)
    words = [word.strip().strip('"') for word in arguments.split(",")]
    assert words[0] == "serve"
    with pytest.raises(SystemExit) as end:
        app([*words, "--help"])
    assert end.value.code == 0
    probes = re.findall(r"httpGet: {path: (\S+), port", text)
    assert len(probes) == 3
    assert {OPERATIONS.target("GET", path).access for path in probes} == {"public"}


def test_the_times_of_a_shutdown_fit():
    """The pause before the end, the drain and what is left: all within the grace of Kubernetes and of systemd."""
    text = (DEPLOY / "kubernetes.yaml").read_text()
    drain, pause, grace = (
        int(re.search(pattern, text)[1])
        for pattern in (r'--drain-timeout, "(\d+)"', r'sleep, "(\d+)"', r"terminationGracePeriodSeconds: (\d+)")
    )
    unit = int(re.search(r"TimeoutStopSec=(\d+)", (DEPLOY / "foreword.service").read_text())[1])
    assert drain + pause < grace
    assert ServerConfig().drain_timeout < unit
