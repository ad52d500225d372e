"""Compare what the native executor draws in greedy steps with the largest of the logits that it computes."""

import numpy as np
from kernel_driver import Driver

from foreword.batch import prepare_inputs, sampling_metadata
from foreword.sampling.processors import Processors

ROWS = 21


def steps(spec, weights, prompts=None, **options):
    """The executor of a new model, and the batch and sampling of each step of greedy requests."""
    driver = Driver(spec, weights, max_num_reqs=64, **options)
    rng = np.random.default_rng(4)
    if prompts is None:
        prompts = rng.integers(0, spec.vocab_size, (ROWS, 9)).tolist()
    for i, tokens in enumerate(prompts):
        driver.add(str(i), tokens)
    processors = Processors(driver.states)
    names = [str(i) for i in range(len(prompts))]
    for count in (3, 1, 5):
        batch = prepare_inputs(driver.states, dict.fromkeys(names, count), driver.buffers, gather_block_tables=False)
        sampling = processors.step(sampling_metadata(batch))
        yield driver.executor, batch, sampling
        driver.states.commit(batch, {})


def check(spec, weights, prompts=None, **options):
    """The tokens drawn have the largest of the logits that the same model computes, the lowest of equal ones."""
    for executor, batch, sampling in steps(spec, weights, prompts, **options):
        drawn = executor.draw(batch, sampling)
        assert not drawn.failures
        want = executor.compute(batch, batch.logits_indices).argmax(1)
        np.testing.assert_array_equal(drawn.token_ids, want)
