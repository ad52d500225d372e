"""A server without a fault shows none; each planted fault is found, shrunk, and shown again by its script."""

import math
import subprocess
import sys

import pytest
from toy_server import FAULTS, Toy, toy_server

from foreword.blackbox import Fuzzer, ServerError, Target, examine, script

NOISE = 0.01  # nats
SCENARIOS = {
    "parent": ["crossed"], "salt": ["salts"], "model": ["models"], "swap": ["long_and_short"], "evict": ["again"],
    "abort": ["aborts"], "last": ["turns"], "fork": ["choices"], "border": ["again"],
}  # fmt: skip
"""Those that can show the fault, where all would take long."""
TIMED = {"abort", "evict", "swap"}
"""Faults that show by the timing of requests at once: how far they shrink depends on the machine's load."""


def searched(toy: Toy, url: str, runs: int = 40, **options):
    server = examine(Target(url, timeout=60), max_words=120)
    fuzzer = Fuzzer(server, **{"seed": 1, "concurrency": 3, "block_sizes": [toy.block_size], **options})
    return fuzzer, fuzzer.run(seconds=60, max_conversations=runs)


def test_a_server_without_a_fault_shows_nothing_beyond_its_noise():
    toy = Toy(noise=NOISE)
    with toy_server(toy) as url:
        fuzzer, report = searched(toy, url, runs=10)
    assert report.finding is None
    assert (report.num_conversations, report.unconfirmed, dict(report.failures)) == (10, 0, {})
    assert NOISE <= report.noise.alone <= 2 * NOISE < fuzzer.target.tolerance
    assert toy.num_requests < 300


@pytest.mark.one_in(9)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_shrunk_to_few_requests_and_tokens(fault):
    toy = Toy(fault, noise=NOISE)
    with toy_server(toy) as url:
        _, report = searched(toy, url, scenarios=SCENARIOS[fault], max_trials=12 if fault == "evict" else 40)
    finding = report.finding
    assert finding is not None
    assert finding.num_shown >= 2
    assert toy.num_requests < 3000
    if fault not in TIMED:
        assert len(finding.conversation.asks) <= 3
        longest = max(count for ask in finding.conversation.asks for _, count in ask.parts)
        assert longest <= 2 * toy.block_size + 1


def test_the_script_of_a_finding_shows_the_fault_and_clears_a_server_without_it(tmp_path):
    path = tmp_path / "finding.py"
    toy = Toy("model")
    with toy_server(toy) as url, toy_server(Toy()) as healthy:
        server = examine(Target(url, api_key="secret"), max_words=120)
        fuzzer = Fuzzer(server, concurrency=3, scenarios=["models"], block_sizes=[16])
        finding = fuzzer.run(seconds=60, max_conversations=5).finding
        path.write_text(script(fuzzer.target, finding), encoding="utf-8")
        wrong, right = (
            subprocess.run([sys.executable, "-I", path, *address], capture_output=True, text=True, env={}, check=False)
            for address in ([], [healthy])
        )
    assert "secret" not in path.read_text(encoding="utf-8")
    assert (wrong.returncode, right.returncode) == (1, 0), wrong.stderr + right.stderr
    assert "3 of 3 copies show it" in wrong.stdout
    assert "0 of 3 copies show it" in right.stdout


@pytest.mark.long
def test_without_log_probabilities_texts_are_compared():
    toy = Toy("border", logprobs=False)
    with toy_server(toy) as url:
        fuzzer, report = searched(toy, url, scenarios=["again"])
    assert fuzzer.target.top == 0
    assert report.finding.difference.distance == math.inf


def test_texts_that_differ_now_and_then_anyway_are_no_finding():
    toy = Toy(noise=0.4, logprobs=False)
    with toy_server(toy) as url:
        _, report = searched(toy, url, runs=6, scenarios=["again", "shared_prefix"])
    assert report.noise.texts_are_unstable
    assert report.finding is None


def test_a_server_whose_equal_requests_differ_widely_is_not_searched():
    toy = Toy(noise=1.0)
    with toy_server(toy) as url, pytest.raises(ServerError, match="nats apart, so a fault of the cache cannot be told"):
        searched(toy, url)
