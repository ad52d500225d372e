"""All tensors of a checkpoint, quantised or not, as weights in our number formats.

| stored                                              | becomes                   | a weight changes by at most        |
|-----------------------------------------------------|---------------------------|------------------------------------|
| 4 bit, each 32 columns of one group                 | Q4_0 (all z = 8), or Q4_1 | 1/64 of its scale                  |
| 2 to 5 bit of MLX, 1 to 4 bit of HQQ by columns     | Q4_1, or Q5_1 for 5 bit   | 1/64 of its scale                  |
| 8 bit; 4 bit in mixed groups; FP8, NVFP4, nf4, fp4  | Q8_0                      | 1/250 of the largest of 32 weights |
| columns that are not a multiple of 32, routers      | F32                       | 0                                  |
| MXFP4                                               | MXFP4                     | 0                                  |
| BitNet                                              | Q4_0                      | 1/2048 of itself                   |

Scales become float16, which adds up to 4e-6 where they are below 6e-5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.files import FETCH_AGAIN, OrderedRows
from foreword.models.quantized.bitnet import bitnet_matrices
from foreword.models.quantized.bitsandbytes import bitsandbytes_matrices
from foreword.models.quantized.compressed import compressed_matrices
from foreword.models.quantized.fp8 import fp8_matrices
from foreword.models.quantized.hqq import hqq_matrices
from foreword.models.quantized.integers import integer_matrices
from foreword.models.quantized.matrix import SAME_MODEL, WITHOUT_IT, ConvertedRows, check_unread, one_of
from foreword.models.quantized.mlx import mlx_matrices
from foreword.models.quantized.mxfp4 import mxfp4_matrices
from foreword.models.quantized.nvfp4 import modelopt_matrices
from foreword.models.quants import Quant
from foreword.models.safetensors import Entry
from foreword.models.text_files import read_object
from foreword.models.weights import Tensor

_READERS = {
    "fp8": fp8_matrices,
    "fbgemm_fp8": fp8_matrices,
    "mxfp8": fp8_matrices,
    "compressed-tensors": compressed_matrices,
    "modelopt": modelopt_matrices,
    "awq": integer_matrices,
    "gptq": integer_matrices,
    "auto-round": integer_matrices,
    "bitsandbytes": bitsandbytes_matrices,
    "hqq": hqq_matrices,
    "bitnet": bitnet_matrices,
    "mxfp4": mxfp4_matrices,
    "metal": mlx_matrices,
    "mlx": mlx_matrices,
}
REFUSED = {
    "aqlm": "weights are sums of vectors from codebooks",
    "eetq": "integers are in the order of a CUDA kernel",
    "fouroversix": "tensors are those of its own classes",
    "fp_quant": "weights are rotated by Hadamard matrices",
    "gemma": "inputs and outputs of products are rounded, too",
    "gguf": "the weights are in a GGUF file, whose path is the model then",
    "higgs": "weights are vectors of a grid, and rotated",
    "nvfp4": "it quantises a model while it is loaded, and has no checkpoints",
    "quanto": "tensors are those of its own classes",
    "quark": "layouts are many, and each has settings of its own",
    "sinq": "a weight has a scale of its row and one of its column",
    "spqr": "some weights are apart in a sparse matrix",
    "torchao": "tensors are those of its own classes",
    "vptq": "weights are vectors of codebooks",
}
"""The other methods of transformers, each with the reason why it is not read."""
_BOUNDS = {
    Quant.Q4_0: "1/64 of its scale",
    Quant.Q4_1: "1/64 of its scale",
    Quant.Q5_1: "1/64 of its scale",
    Quant.Q8_0: "1/250 of the largest of 32 weights",
    Quant.F32: "0",
}
_OF_ACTIVATIONS = (
    *(".input_scale", ".input_global_scale", ".input_zero_point"),
    *(".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".activation_scale", ".input_scale_ub"),
)
"""The keys of scales for activations and keys, which are not quantised here."""
_OF_MLX = "quantization"
"""The key of a config.json by MLX, which repeats it as quantization_config."""
_OF_MODELOPT = "hf_quant_config.json"
"""The file of settings beside a config.json that has none, which older versions of modelopt write."""

_WITHOUT_EFFECT = {
    # the tensors show which layers are quantised, and how many columns share a scale
    *("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "config_groups", "lm_head"),
    *("exclude_modules", "skip_modules", "llm_int8_skip_modules", "bnb_4bit_quant_storage", "quant_lm_head"),
    *("extra_config", "modules_in_block_to_quantize", "to_quant_block_names", "quant_block_list"),
    *("block_name_to_quantize", "weight_block_size", "group_size", "desc_act", "sym", "zero_point"),
    *("checkpoint_format",),
    # these concern activations and keys, which are not quantised here
    *("activation_scheme", "activation_scale_ub", "kv_cache_scheme", "kv_cache_quant_algo", "use_cuda_fp16"),
    *("hyb_act", "llm_int8_threshold", "bnb_4bit_compute_dtype"),
    *("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym"),
    # these describe how the checkpoint was made, and how other implementations compute with it
    *("quant_method", "bits", "format", "version", "fmt", "scale_fmt", "quantization_status", "dequantize", "backend"),
    *("global_compression_ratio", "true_sequential", "static_groups", "act_group_aware", "damp_percent", "dataset"),
    *("damp_auto_increment", "mse", "meta", "quantizer", "tokenizer", "batch_size", "model_seqlen", "max_input_length"),
    *("module_name_preceding_first_block", "cache_block_outputs", "pad_token_id", "disable_exllama", "use_exllama"),
    *("exllama_config", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "pack_dtype", "run_compressed"),
    *("producer", "llm_int8_enable_fp32_cpu_offload", "_load_in_4bit", "_load_in_8bit", "autoround_version", "iters"),
    *("low_gpu_mem_usage", "nsamples", "seqlen", "lr", "minmax_lr", "enable_quanted_input", "enable_minmax_tuning"),
    *("enable_norm_bias_tuning", "gradient_accumulate_steps", "scale_dtype", "amp", "seed"),
    *("uses_bad_zero", "offload_to_disk", "model_name_or_path", "model_file_base_name"),
}
"""Keys of a quantization_config that change no weight, beside those that are read."""


def read_weights(entries: Mapping[str, Entry], config: Config) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, those of quantised matrices under the names of the matrices, by the
    ``quantization_config`` of its config.json. Raise ModelError for a quantisation that is not supported, and if
    tensors do not fit it or each other.
    """
    key, beside = "quantization_config", config.path.with_name(_OF_MODELOPT)
    default, methods, given = "", tuple(_READERS), config.value(key)
    if (of_mlx := config.value(_OF_MLX)) is not None:
        if given not in (None, of_mlx):
            raise config.error(f"{key} differs from {_OF_MLX}", USE_ITS_CONFIG)
        key, default, methods, given = _OF_MLX, "mlx", ("mlx",), of_mlx
    if given is None and not beside.exists():
        return {name: entry.tensor() for name, entry in entries.items()}
    if given is None:
        config, key, default, methods = Config(beside, read_object(beside)), "quantization", "modelopt", ("modelopt",)
        given = config.value(key)
    if not isinstance(given, dict):
        raise config.error(f"{key} is {given!r:.80}, not a JSON object", FETCH_AGAIN)
    settings = Config(config.path, {f"quantization_config.{key}": value for key, value in given.items()})
    if any(settings.value(f"quantization_config.{key}") is True for key in ("load_in_4bit", "load_in_8bit")):
        default = default or "bitsandbytes"
    named = settings.value("quantization_config.quant_method")
    if isinstance(named, str) and named.lower() in REFUSED:
        what = f"quantization_config.quant_method is {named!r}, which is not supported: {REFUSED[named.lower()]}"
        raise settings.error(what, f"Use a checkpoint of {', '.join(methods)}, or an unquantised one")
    method = one_of(settings, "quant_method", default, methods)
    reader = _READERS[method]
    is_plain = method == "modelopt" and settings.value("quantization_config.quant_algo") is None
    weights: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, matrix, parts in () if is_plain else reader(entries, settings, method):
        if not isinstance(matrix, Tensor):
            matrix = Tensor(ConvertedRows(matrix, 0, matrix.shape[0]), matrix.quant, matrix.shape)
        weights[name] = matrix
        used.update(part.name for part in parts)
    check_unread(settings, _WITHOUT_EFFECT, f"{WITHOUT_IT}, or an unquantised one")
    if not weights and not is_plain:
        raise config.error(f"quantization_config says {method}, but no weight is stored so", SAME_MODEL)
    for name, entry in entries.items():
        if name in used or (reader is not integer_matrices and name.endswith(_OF_ACTIVATIONS)):
            continue
        if name in weights:
            raise entry.error("is there twice, once quantised", SAME_MODEL)
        weights[name] = entry.tensor()
    return weights


def conversions(tensors: Iterable[Tensor]) -> list[str]:
    """Return what was converted to what, a line per pair of formats."""
    stored = [(t.stored.rows if isinstance(t.stored, OrderedRows) else t.stored, t.quant) for t in tensors]
    pairs = Counter((rows.matrix.source, quant) for rows, quant in stored if isinstance(rows, ConvertedRows))
    return [
        f"matrices converted from {source} to {quant.name}: {count}. A weight changes by at most {_BOUNDS[quant]}"
        for (source, quant), count in pairs.items()
    ]
