"""transformers' continuous batching under a shadow: nothing is found, unless its cache indices are changed."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from foreword.shadow import Finding
from foreword.shadow.transformers import followed

PAGE, WINDOW, VOCAB = 16, 40, 200


def generate(on_finding=None, num_prompts=10, num_blocks=120):
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=512, query_pre_attn_scalar=16,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    rng = np.random.default_rng(0)
    shared = rng.integers(3, VOCAB, 48).tolist()
    lengths = rng.integers(1, 120, num_prompts)
    prompts = [(shared if i % 3 else []) + rng.integers(3, VOCAB, int(n)).tolist() for i, n in enumerate(lengths)]
    with followed(on_finding=on_finding) as shadows:
        out = model.generate_batch(
            prompts,
            generation_config=transformers.GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=-1),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=num_blocks, max_batch_tokens=64, use_async_batching=False
            ),
        )
    (shadow,) = shadows
    return out, shadow.report()


def test_healthy_batches_have_no_finding():
    out, report = generate()
    assert len(out) == 10
    assert report.ok, str(report)
    assert report.num_compared > 40


def test_a_window_that_is_read_one_position_too_far_back_is_named(monkeypatch):
    from transformers.generation.continuous_batching.cache_allocators.sliding_attention import (
        SlidingAttentionCacheAllocator as Sliding,
    )

    read = Sliding.get_read_indices

    def shifted(self, request_id, past_length, query_length):
        return read(self, request_id, past_length - (past_length >= WINDOW), query_length)

    monkeypatch.setattr(Sliding, "get_read_indices", shifted)
    found: list[Finding] = []
    generate(found.append)
    assert {(f.tensor, f.origin) for f in found} == {("read_slots", "runner")}
