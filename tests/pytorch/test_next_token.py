"""Heads for further tokens against the layers for them in transformers."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")
layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(layers, "MtpModel"):
    pytest.skip("this release of transformers has no layers for further tokens", allow_module_level=True)

from transformers.cache_utils import MtpCache

from models.head_models import head_logits, whole, with_head
from models.recorded import TINY


@pytest.mark.parametrize(("name", "family"), [("glm4-moe", "Glm4Moe"), ("deepseek-v3", "DeepseekV3")])
def test_a_head_gives_the_logits_of_transformers(name, family, tmp_path, monkeypatch):
    model, text = with_head(tmp_path, name), TINY[name]["token_ids"]
    kind = getattr(transformers, f"{family}ForCausalLM")
    further = rf"model\.layers\.{model.spec.num_layers}.*"  # which tells its weights from those of the model
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [further])
    reference = kind.from_pretrained(tmp_path / name, dtype=torch.float32, attn_implementation="eager").eval()
    mtp, ids = layers.MtpModel.from_pretrained(reference).eval(), torch.tensor([text])
    with torch.no_grad():
        hidden = reference(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        _, want, *_ = mtp(
            input_ids=ids[:, 1:],
            last_hidden_states=hidden,
            attention_mask=None,
            position_ids=torch.arange(1, len(text))[None],
            mtp_cache=MtpCache(config=reference.config.get_mtp_config()),
        )
    _, own = whole(model.spec, model.weights, text[:-1])
    np.testing.assert_allclose(own, hidden[0], atol=1e-4)
    logits, _ = head_logits(model, text, own)
    np.testing.assert_allclose(logits[-1], want.ravel(), atol=1e-4)
    assert logits[-1].std() > 0.5
