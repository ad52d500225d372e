"""Why a causal type of transformers has no native implementation: one table, of which the page of all types is made."""

from __future__ import annotations

from collections.abc import Mapping

_REASONS: Mapping[str, str] = {
    "the decoder of an encoder–decoder": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus plbart
        prophetnet trocr whisper""",
    "an encoder, which is used as a decoder": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod""",
    "positions are sinusoidal in another way, or relative": "cpmant ctrl reformer xlm xlnet",
    "sparse attention: an indexer chooses the keys that a query sees": """
        deepseek_v4 dots3_note dots3_note_text minimax_m3_vl_text qwen4_exp qwen4_exp_text""",
    "layers whose state is of another kind": "rwkv xlstm zamba",
    "convolutions inside attention": "inkling2_text inkling_text",
    "runs behind an encoder of images or sounds": """
        emu3 fuyu git got_ocr2 mllama moshi moss_transcribe_diarize phi4_multimodal""",
    "reads the keys and values of another model": "gemma4_assistant gemma4_unified_assistant",
    "attention of another form: of two softmaxes, with masks that it computes, or routed to heads": """
        diffllama doge jetmoe""",
    "sums have a factor of the residual stream, and gates a bias for each head": "beam",
    "tokens are groups of bytes": "blt",
}
NOT_NATIVE: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""By type. A type has a reason here or a family, never both."""
