"""The oracle model of the engine's tests on a device: each token is computed from what the slots before it hold."""

import numpy as np
from device_place import host, to_device
from oracle_model import START, following, logits_after

from foreword.device import layout


class OracleOnRows:
    """A slot holds a hash of the tokens up to its position, which the next token reads through the row's own blocks.

    The logits after token BAD are not numbers.
    """

    BAD = 27
    hidden_size = mrope_dims = 0
    adapters = None

    def __init__(self, vocab_size: int, num_blocks: int, block_size: int) -> None:
        self.vocab_size, self.block_size = vocab_size, block_size
        self.memory = np.full(num_blocks * block_size, -1, np.int64)
        self.num_steps, self.fails_at = 0, frozenset[int]()

    def forward(self, rows, num_tokens, num_reqs, num_logits, inputs):
        self.num_steps += 1
        if self.num_steps in self.fails_at:
            raise MemoryError("the step fails")
        tensors = {name: host(values) for name, values in rows.tensors.items()}
        arena, place = host(rows.arena), rows.layout
        table_at, _, width = place.groups[0, :3].tolist()
        prefixes = np.zeros(num_tokens, np.int64)
        packet = host(rows.packet)
        for t in range(int(packet[layout.HEADER.index("num_tokens")])):
            slot, position = int(tensors["slot_mapping"][0][t]), int(tensors["positions"][t])
            prefix = START
            if position:
                row = int(tensors["idx_mapping"][tensors["req_indices"][t]])
                block = int(arena[table_at + row * width + (position - 1) // self.block_size])
                prefix = int(self.memory[block * self.block_size + (position - 1) % self.block_size])
            assert 0 <= tensors["input_ids"][t] < self.vocab_size  # an embedding has no other rows
            prefixes[t] = self.memory[slot] = following(prefix, int(tensors["input_ids"][t]))
        at = tensors["logits_indices"][:num_logits]
        logits = np.stack([logits_after(int(prefixes[t]), self.vocab_size) for t in at])
        logits[tensors["input_ids"][at] == self.BAD] = np.nan
        logits[:, self.BAD] = -9  # not sampled
        return to_device(logits)

    def copy_blocks(self, sources, destinations):
        blocks = self.memory.reshape(-1, self.block_size)
        blocks[destinations] = blocks[sources]
