"""The names and shapes that MLX gives the tensors of a checkpoint that it converts, quantised or not.

| in a checkpoint of MLX                                        | read as                                             |
|---------------------------------------------------------------|-----------------------------------------------------|
| PATH.switch_mlp.NAME, PATH.switch_glu.NAME, PATH.experts.NAME | NAME of the experts of a layer, [experts, out, in]  |
| PATH.embed_q, PATH.unembed_out                                | the halves of kv_b_proj, head by head               |
| convolutions [channels, kernel, 1]                            | [channels, 1, kernel]                               |
| norms of a model that has such convolutions                   | norms, also where other checkpoints have them less 1|
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from foreword.models.weights import Tensor, float_tensor

_CONVOLUTIONS = ("conv1d.weight", ".conv.conv.weight")
_KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "fc1": "up", "fc2": "down"}
_EXPERTS = re.compile(
    r"(.*?)\.\d+\.(.*(?<![a-z_])(?:switch_mlp|switch_glu|experts)\.)"
    r"(gate_proj|up_proj|down_proj|(?<=switch_mlp\.)fc[12])\.(weight|bias)"
)
LATENTS = {"k_b": "self_attn.embed_q.weight", "v_b": "self_attn.unembed_out.weight"}
"""The ends of the names of the halves of kv_b_proj: [heads, kv_rank, nope_dim] and [heads, value_dim, kv_rank]."""


def with_usual_convolutions(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """Return the tensors of a checkpoint by MLX with convolutions as other checkpoints have them; None if it has none
    of MLX.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(_CONVOLUTIONS) and len(tensor.shape) == 3 and tensor.shape[2] == 1 < tensor.shape[1]:
            channels, kernel, _ = tensor.shape
            found[name] = float_tensor(tensor.dequantize().reshape(channels, 1, kernel))
    return found if any(found[name] is not tensor for name, tensor in tensors.items()) else None


def expert_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return where a checkpoint by MLX has all experts of a layer: by canonical names, those of tensors, {i} the layer.
    Other checkpoints have none of them.
    """
    found: dict[str, str] = {}
    for name in tensors:
        if (match := _EXPERTS.fullmatch(name)) is not None:
            before, path, kind, part = match.groups()
            end = "_bias" if part == "bias" else ""
            found[f"experts.{_KINDS[kind]}{end}"] = f"{before}.{{i}}.{path}{kind}.{part}"
    return found
