"""The keys of model files as data: those that a family reads, the values that it computes, those without effect.

A family declares every key that its reference implementation reads. `Config.check` refuses a value that is not
computed; what is neither declared nor without effect is listed by `Config.unread` and has no influence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

ONLY_IN_GGUF = "*."
"""Names of keys that only GGUF files have begin with this, in place of the architecture."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a config.json.

    default: its value where a config.json lacks it; None: it is required, or follows from other keys.
    values: those that are computed; empty: the family reads the key and checks its value itself.
    own: the name that a config.json of the family has for it; empty: ``name``.
    is_alias: ``name`` may stand for ``own`` in a config.json; otherwise the reference does not read it there.
    gguf: its name in the metadata of a GGUF file, behind the architecture; empty: such files do not have it.
    gguf_default: its value where a GGUF file lacks it. kind: of its values, also where nothing reads them; object: any;
    None: that of the default, or any.
    """

    name: str
    default: object = None
    values: tuple[object, ...] = ()
    gguf: str = ""
    gguf_default: object = None
    kind: type | None = None
    own: str = ""
    is_alias: bool = False

    @property
    def label(self) -> str:
        """The name in a config.json."""
        return self.own or self.name

    @property
    def value_type(self) -> type | None:
        """The type of values other than null; None: the family checks it, or ``values`` have all of them."""
        if self.kind is not None or self.values:
            return None if self.kind is object else self.kind
        return type(self.default) if isinstance(self.default, bool | int | float | str) else None


Keys = Mapping[str, Key]


def table(*groups: Iterable[Key], **defaults: object) -> Keys:
    """Return the keys of all groups by name, some with another default. A later key replaces one of the same name, also
    of the same name in GGUF files.
    """
    keys: dict[str, Key] = {}
    names_in_gguf: dict[str, str] = {}
    for key in (key for group in groups for key in group):
        if key.gguf:
            keys.pop(names_in_gguf.get(key.gguf, ""), None)
            names_in_gguf[key.gguf] = key.name
        keys[key.name] = key
    return keys | {name: replace(keys[name], default=default) for name, default in defaults.items()}


def only(name: str, *values: object, gguf: str = "") -> Key:
    """Return a key that is computed for these values alone; the first is the default."""
    return Key(name, values[0], values, gguf)


def of_gguf(
    name: str,
    default: object = None,
    values: tuple[object, ...] = (),
    *,
    gguf_default: object = None,
    kind: type | None = None,
) -> Key:
    """Return a key that only GGUF files have, whose name begins with `ONLY_IN_GGUF`. The rest of it is theirs."""
    return Key(name, default, values, name.removeprefix(ONLY_IN_GGUF), gguf_default, kind)


def only_in_gguf(gguf: str, *values: object) -> Key:
    """Return a key that only GGUF files have. It is computed for these values alone; None: for no value."""
    return of_gguf(ONLY_IN_GGUF + gguf, values[0], values)


_REASONS: Mapping[str, str] = {
    "for training alone": """
        L_bp_cycles activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop aux_loss_alpha
        classifier_dropout dropout emb_pdrop embd_pdrop embed_dropout embedding_dropout embedding_fraction
        embedding_initializer_range final_w_init_variance_scale gradient_checkpointing hidden_dropout
        hidden_dropout_prob init_device init_std initializer_cutoff_factor initializer_range input_jitter_noise
        layerdrop learnable_sink_init linear_a_log_max
        linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min mamba_dt_init_floor mamba_dt_max
        mlp_dropout moe_jitter_eps moe_loss_weight mtp_loss_scaling_factor output_dropout output_router_logits
        qa_dropout rescale_prenorm_residual resid_dropout resid_pdrop residual_dropout router_aux_loss_coef
        router_jitter_noise seq_aux seq_classif_dropout sparse_pred_ignore_index sparse_prediction time_step_floor
        time_step_init_scheme time_step_max time_step_min time_step_scale w_init_variance_scale z_loss_coefficient""",
    "how another implementation computes the same numbers": """
        _attn_implementation _attn_implementation_autoset attention_softmax_in_fp32 attn_implementation
        cache_implementation chunk_size chunk_size_feed_forward deterministic_flash_attn dtype ep_size
        mamba_chunk_size mamba_ssm_cache_dtype n_ctx num_logits_to_keep pretraining_tp reference_compile
        reorder_and_upcast_attn repad_logits_with_grad residual_in_fp32 scale_attention_softmax_in_fp32 slow_but_exact
        torch_dtype use_associative_scan use_cache use_falcon_mambapy use_mamba_kernels use_mambapy use_mem_eff_path""",
    "follows from other keys, and the reference does not read it": "kv_channels num_query_groups",
    "what another implementation returns": "output_attentions output_hidden_states return_dict use_return_dict",
    "where the file comes from": "_name_or_path name_or_path transformers_version unsloth_fixed unsloth_version",
    "tokens, which the tokenizer's files have": """
        bos_token_id cls_token_id decoder_start_token_id eod_token_id eos_token_id mask_token_id pad_token_id
        sep_token_id""",
    "of heads that predict further tokens, which are not run": """
        mtp_hybrid_override_pattern mtp_layer_types mtp_layers_block_type mtp_mlp_layer_types mup_denominator""",
    "of a classifier's head, or of one that is not run": """
        decoder_bias id2label label2id num_labels problem_type sbert_ce_default_activation_function
        sentence_transformers summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels
        summary_type summary_use_proj""",
    "follows from the tensors of a GGUF file": "tensor_data_layout",
    "of biases that the family never has: a file with one is refused": "attention_bias mlp_bias use_bias",
}
WITHOUT_EFFECT: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Keys that change no number of any family, each with the reason. A family's own table comes first."""
