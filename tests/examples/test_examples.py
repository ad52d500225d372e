"""The examples run as they are, and their tokens are those of each request computed alone."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOT_NEEDED = ["tokenizers", "jinja2", "rich", "typer", "torch"]

paged = runpy.run_path(str(EXAMPLES / "paged_engine.py"))
arrays = runpy.run_path(str(EXAMPLES / "own_arrays.py"))


def logits_of(tokens: list[int]) -> np.ndarray:
    """[V] after the last token: the decoder of paged_engine.py without cache, blocks and batch, head by head."""
    x = paged["EMBEDDING"][tokens] + paged["POSITION"][: len(tokens)]
    hidden, heads = paged["HIDDEN"], paged["HEADS"]
    size = hidden // heads
    for qkv, out in zip(paged["QKV"], paged["OUT"], strict=True):
        q, k, v = x @ qkv[:, :hidden], x @ qkv[:, hidden : 2 * hidden], x @ qkv[:, 2 * hidden :]
        attended = np.empty_like(x)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            for i in range(len(tokens)):
                weights = np.exp(k[: i + 1, part] @ q[i, part])
                attended[i, part] = weights @ v[: i + 1, part] / weights.sum()
        x = x + attended @ out
    return x[-1] @ paged["EMBEDDING"].T


def alone(prompt: list[int], count: int) -> list[int]:
    """The greedy tokens of one prompt, every one from a forward pass over the whole sequence."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.fixture
def steps(monkeypatch) -> list[list[int]]:
    """Tokens per request of every step that `paged_engine.generate` runs."""
    seen: list[list[int]] = []
    scope = paged["generate"].__globals__
    forward = scope["forward"]

    def counted(batch):
        seen.append(batch.num_scheduled_tokens.tolist())
        return forward(batch)

    monkeypatch.setitem(scope, "forward", counted)
    return seen


@pytest.mark.smoke
def test_the_paged_engine_gives_the_tokens_of_each_request_alone(steps):
    prompts = {"a": [5, 17, 3], "b": list(range(20, 31)), "c": [64, 2, 64, 2, 9]}
    assert paged["generate"](prompts, 6) == {req_id: alone(prompt, 6) for req_id, prompt in prompts.items()}
    assert any(1 in step and max(step) > 1 for step in steps), "no step has a decode and a prompt chunk"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_finished_requests_are_used_again(seed):
    rng = np.random.default_rng(seed)
    prompts = {str(i): rng.integers(0, paged["VOCAB"], rng.integers(1, 20)).tolist() for i in range(9)}
    assert sum(map(len, prompts.values())) > paged["NUM_BLOCKS"] * paged["BLOCK_SIZE"]
    assert paged["generate"](prompts, 5) == {req_id: alone(prompt, 5) for req_id, prompt in prompts.items()}


def test_the_paged_engine_refuses_a_request_larger_than_its_cache():
    with pytest.raises(ValueError, match=r"request 'long': needs 12 blocks, the cache has 9"):
        paged["generate"]({"long": [1] * 40}, 5)


@pytest.mark.parametrize("seed", range(3))
def test_the_engine_in_arrays_gives_the_tokens_of_each_request_alone(seed):
    rng = np.random.default_rng(seed)
    vocab = arrays["VOCAB"]
    prompts = [rng.integers(0, vocab, rng.integers(1, 200)).tolist() for _ in range(150)]
    lens = np.array(list(map(len, prompts)), np.int32)
    got = arrays["generate"](np.concatenate(prompts).astype(np.int32), lens, 20)
    for prompt, tokens in zip(prompts, got.tolist(), strict=True):
        expected, last = [], prompt[-1]
        for position in range(len(prompt) - 1, len(prompt) + 19):
            last = (31 * last + position) % vocab
            expected.append(last)
        assert tokens == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("path", [EXAMPLES / "paged_engine.py", EXAMPLES / "own_arrays.py"], ids=lambda path: path.stem)
def test_an_example_runs_with_numpy_alone(path):
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({NOT_NEEDED})); runpy.run_path({str(path)!r}, run_name='__main__')"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3


def test_every_example_is_listed():
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
