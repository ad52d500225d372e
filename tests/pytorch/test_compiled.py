"""The torch executor through torch.compile: the same logits and tokens. Takes a minute of a compiler."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")

from foreword.errors import ConfigError
from foreword.executors.kinds import NUMPY
from foreword.executors.torch.executor import TorchExecutor
from foreword.executors.torch.parallel import ParallelExecutor
from kernels.kernel_adapters import merged, random_adapter
from kernels.kernel_driver import Driver
from kernels.kernel_reference import SPECS, Reference, random_weights
from kernels.kernel_traffic import BLOCK_SIZE, assert_traffic_changes_nothing, engine
from pytorch.compiling import compiles

OPTIONS = {"num_blocks": 90, "block_size": BLOCK_SIZE, "dtype": "fp32", "num_threads": 1}


@compiles
@pytest.mark.parametrize("name", ["gemma", "moe"])
def test_a_compiled_model_gives_the_same_logits_and_tokens(name):
    """In steps of many tokens and of one, and with adapters, which are not compiled."""
    spec, weights, adapter = SPECS[name], random_weights(SPECS[name]), random_adapter(SPECS[name], 3, 0)
    executor = TorchExecutor(spec, weights, compile=True, **OPTIONS)
    executor.load_lora(7, adapter)
    run = Driver(spec, weights, executor=executor, block_size=BLOCK_SIZE, num_blocks=90)
    tokens = np.random.default_rng(3).integers(0, spec.vocab_size, 40).tolist()
    for number, own in ((0, weights), (7, merged(weights, adapter))):
        want = Reference(spec, own).logits(tokens)
        run.add(str(number), tokens, number)
        for count, end in ((31, 31), (1, 32), (8, 40)):
            got = run.step({str(number): count})[str(number)]
            assert np.abs(got - want[end - 1]).max() < 1e-4 * np.abs(want[end - 1]).max()
    crowd = engine(executor, spec, num_blocks=90)
    alone = engine(TorchExecutor(spec, weights, **OPTIONS), spec, num_blocks=90, prefix_caching=False)
    assert_traffic_changes_nothing(crowd, alone, spec.vocab_size)


def test_what_is_not_compiled_is_refused_by_name(monkeypatch):
    spec, weights = SPECS["gemma"], random_weights(SPECS["gemma"])
    with pytest.raises(ConfigError, match=r"compile=True: layers that processes divide .*tensor_parallel_size=2 out"):
        ParallelExecutor(spec, weights, tensor_parallel_size=2, compile=True, **OPTIONS)
    with pytest.raises(ConfigError, match=r"compile=True: executor 'numpy' has no such option; give executor 'torch'"):
        NUMPY.read_options({"compile": True})
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"compile=True: torch.compile needs the C\+\+ compiler 'no-such-compiler'"):
        TorchExecutor(spec, weights, compile=True, **OPTIONS)
