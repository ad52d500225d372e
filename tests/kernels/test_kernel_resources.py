"""Threads that cannot start, forked processes, and memory that is not there: typed errors, and the model goes on."""

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from kernel_driver import Driver
from kernel_reference import SPECS, random_weights
from test_kernel_sampler import draw

from foreword.errors import ConfigError, EngineError

SPEC = SPECS["llama"]
WEIGHTS = random_weights(SPEC)
TOKENS = np.random.default_rng(1).integers(0, SPEC.vocab_size, 1200).tolist()

linux = pytest.mark.skipif(
    sys.platform != "linux" or "san.so" in os.environ.get("LD_PRELOAD", ""),
    reason="limits of a process as Linux has them; a sanitizer reserves the address space",
)


def in_process(program: str) -> str:
    """The output of a program in a process of its own."""
    names = "import os, resource, numpy as np\nfrom test_kernel_resources import *\nfrom foreword.errors import *\n"
    done = subprocess.run(
        [sys.executable, "-c", names + textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("count", [0, -1, 1025, 100_000])
def test_a_number_of_threads_out_of_range_is_refused(count):
    with pytest.raises(ConfigError, match=f"num_threads={count}: must be from 1 to 1024"):
        Driver(SPEC, WEIGHTS, num_threads=count)


def test_a_variable_that_is_no_number_of_threads_is_refused(monkeypatch):
    for value in ("0", "two", "4x", "5000"):
        monkeypatch.setenv("FOREWORD_NUM_THREADS", value)
        with pytest.raises(ConfigError, match=f"FOREWORD_NUM_THREADS = '{value}'"):
            Driver(SPEC, WEIGHTS, num_threads=None)


@pytest.mark.long
@linux
def test_threads_that_cannot_start_are_refused_and_fewer_can():
    out = in_process("""
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        try:
            Driver(SPEC, WEIGHTS, num_threads=1000)
        except ConfigError as error:
            print(error)
        Driver(SPEC, WEIGHTS, num_threads=4).run_alone("a", TOKENS, [100])
        print("used")
    """)
    assert "num_threads = 1000: this process can have only" in out
    assert "used" in out


@pytest.mark.long
@linux
def test_a_step_whose_buffers_cannot_grow_changes_nothing():
    out = in_process("""
        driver = Driver(SPEC, WEIGHTS)
        first = driver.run_alone("a", TOKENS[:40], [30, 9, 1])[1:]
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        driver.add("b", TOKENS)
        for left in range(0, 12 << 20, 300_000):
            resource.setrlimit(resource.RLIMIT_AS, (used + left, resource.RLIM_INFINITY))
            try:
                got = driver.step({"b": 1200})["b"]
            except MemoryError:
                print("MemoryError")
                continue
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            break
        fresh = Driver(SPEC, WEIGHTS)
        assert np.array_equal(got, fresh.run_alone("b", TOKENS, [1200])[0])
        again = Driver(SPEC, WEIGHTS).run_alone("a", TOKENS[:40], [30, 9, 1])[1:]
        assert np.array_equal(first, again)
    """)
    assert out.count("MemoryError") > 1


@pytest.mark.long
@linux
def test_a_pool_that_does_not_fit_is_a_memory_error():
    out = in_process("""
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        for num_blocks in (1 << 22, (1 << 31) - 1):
            try:
                Driver(SPEC, WEIGHTS, num_blocks=num_blocks)
            except MemoryError as error:
                print("MemoryError", error)
    """)
    assert out.count("MemoryError the KV pool") == 2


@pytest.mark.one_in(2)
@linux
@pytest.mark.parametrize("block_size", [16, 12])
def test_preallocation_provides_the_whole_pool_and_changes_no_number(block_size):
    out = in_process(f"""
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

        def pool_bytes(preallocate_kv):
            before = resident()
            driver = Driver(SPEC, WEIGHTS, num_blocks=6000, block_size={block_size}, preallocate_kv=preallocate_kv)
            return driver, resident() - before

        (lazy, small), (whole, large) = pool_bytes(False), pool_bytes(True)
        pool = 6000 * {block_size} * 2 * SPEC.num_slots * SPEC.num_kv_heads * SPEC.head_dim * 4
        assert large - small > 0.9 * pool > 10e6, (small, large, pool)
        logits = []
        for driver in (lazy, whole):
            driver.add("a", TOKENS)
            driver.step({{"a": 700}})
            if driver is whole:
                driver.executor.core.touch_cache()
            logits.append(driver.step({{"a": 500}})["a"])
        assert np.array_equal(*logits)
        print("equal")
    """)
    assert out == "equal\n"


@linux
def test_memory_of_a_long_prompt_returns_to_the_system_after_many_small_steps_and_no_number_changes():
    out = in_process("""
        from dataclasses import replace

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

        wide = replace(SPEC, intermediate_size=8192)
        driver = Driver(wide, random_weights(wide))
        (first,) = driver.run_alone("a", TOKENS[:1100], [1000])
        before = resident()
        steps = [driver.step({"a": 1})["a"] for _ in range(70)]
        assert before - resident() > 10e6, (before, resident())
        again, *more = driver.run_alone("b", TOKENS[:1100], [1000, *[1] * 70])
        assert np.array_equal(first, again) and np.array_equal(steps, more)
        print("equal")
    """)
    assert out == "equal\n"


def test_preallocation_is_on_or_off():
    with pytest.raises(ConfigError, match="preallocate_kv='yes': expected True or False"):
        Driver(SPEC, WEIGHTS, preallocate_kv="yes")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_gets_an_error_unless_the_model_has_one_thread():
    out = in_process("""
        def child(driver):
            pid = os.fork()
            if pid == 0:
                try:
                    driver.step({"a": 1})
                    print("computed", flush=True)
                except EngineError as error:
                    print(error, flush=True)
                del driver
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        for num_threads in (2, 1):
            driver = Driver(SPEC, WEIGHTS, num_threads=num_threads)
            driver.run_alone("a", TOKENS[:9], [7])
            child(driver)
            print("parent", len(driver.step({"a": 1})["a"]), flush=True)
    """)
    error, parent, computed, again = out.splitlines()
    assert "forked" in error
    assert "after the fork" in error
    assert (parent, computed, again) == ("parent 301", "computed", "parent 301")


@pytest.mark.long
def test_a_second_thread_gets_an_error_or_its_turn():
    driver = Driver(SPEC, WEIGHTS, max_tokens=4096)
    core = driver.executor.core
    (want,) = driver.run_alone("a", TOKENS, [1200])
    errors: list[str] = []
    done = threading.Event()

    def disturb():
        logits, none = np.zeros((4, 300), np.float32), np.zeros(0, np.int32)
        while not done.is_set():
            try:
                core.copy_blocks(none, none)
                draw(logits, [{"temperature": 1.0}], np.array([0]), np.arange(4), np.zeros(4, np.int32), core)
            except RuntimeError as error:
                errors.append(str(error))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(20):
            driver.states.num_computed_tokens[driver.states.row_of("a")] = 0
            try:
                got = driver.step({"a": 1200})["a"]
            except EngineError as error:
                errors.append(str(error))
                driver = Driver(SPEC, WEIGHTS, max_tokens=4096, executor=driver.executor)
                driver.add("a", TOKENS)
            else:
                np.testing.assert_array_equal(got, want)
    finally:
        done.set()
        thread.join()
    assert errors
    assert all("another thread" in error for error in errors)
