"""Threads divided among the processors of NUMA nodes: the tokens, and where weights are first touched."""

import os

import numpy as np
import pytest
from greedy_steps import check
from kernel_adapters import random_adapter
from kernel_driver import Driver
from kernel_reference import SPECS, random_weights

from foreword.errors import ConfigError
from foreword.executors import native, nodes

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")


@pytest.fixture
def groups(monkeypatch):
    """Two nodes: the processors that this process may use, divided in two."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two processors")
    found = [cpus[: len(cpus) // 2], cpus[len(cpus) // 2 :]]
    monkeypatch.setattr(nodes, "numa_nodes", lambda: found)
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["llama", "moe", "gated_delta"])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_nodes_do_not_change_a_bit(groups, name, num_threads):
    """Prompts of many rows, and of few, that one call computes; the matrices have odd numbers of panels."""
    spec, tokens = SPECS[name], np.random.default_rng(3).integers(0, SPECS[name].vocab_size, 150).tolist()
    weights = random_weights(spec)
    want = Driver(spec, weights, num_threads=1).run_alone("a", tokens, [120, 1, 2, 27])
    divided = Driver(spec, weights, num_threads=num_threads, numa_nodes=2, preallocate_kv=True)
    got = divided.run_alone("a", tokens, [120, 1, 2, 27])
    for logits, wanted in zip(got, want, strict=True):
        np.testing.assert_array_equal(logits, wanted)


@pytest.mark.parametrize("name", ["llama", "moe", "latent"])
def test_nodes_do_not_change_a_bit_of_adapters(groups, name):
    spec, tokens = SPECS[name], np.random.default_rng(3).integers(0, SPECS[name].vocab_size, 90).tolist()
    logits = []
    for options in ({"num_threads": 1}, {"num_threads": 3, "numa_nodes": 2}):
        driver = Driver(spec, random_weights(spec), weight_format="int8", **options)
        driver.executor.load_lora(7, random_adapter(spec, 20, 1))
        logits.append(driver.run_alone("a", tokens, [60, 1, 2, 27], lora_id=7))
    for one, other in zip(*logits, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("weight_format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_greedy_tokens_found_by_nodes(groups, name, weight_format):
    check(SPECS[name], random_weights(SPECS[name]), weight_format=weight_format, num_threads=3, numa_nodes=2)


def test_each_node_packs_the_panels_that_it_multiplies(groups):
    before = os.sched_getaffinity(0)
    spec = SPECS["llama"]
    core = Driver(spec, random_weights(spec), num_threads=2, numa_nodes=2).executor.core
    assert os.sched_getaffinity(0) == before
    for matrix in range(7):
        cpus = core.packed_on(matrix)
        half = len(cpus) // 2
        assert set(cpus[:half]) <= set(groups[0])
        assert set(cpus[half:]) <= set(groups[1])


def test_nodes_are_read_from_the_system(tmp_path, monkeypatch):
    for name, cpus in (("node0", "0-3,8-9\n"), ("node1", "4,6\n"), ("node2", "\n"), ("node10", "12-13\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1, 13)))
    assert nodes.numa_nodes(tmp_path) == [[1, 2, 3, 8, 9], [4, 6], [12]]
    assert nodes.numa_nodes(tmp_path / "absent") == []


def test_nodes_that_the_machine_lacks_are_refused(groups):
    spec = SPECS["llama"]
    with pytest.raises(ConfigError, match="numa_nodes=3: must be at least 1, and at most 2"):
        native.NativeExecutor(spec, random_weights(spec), num_blocks=4, block_size=16, numa_nodes=3)
    with pytest.raises(ConfigError, match="2 groups of processors need a thread each"):
        native.NativeExecutor(spec, random_weights(spec), num_blocks=4, block_size=16, numa_nodes=2, num_threads=1)
