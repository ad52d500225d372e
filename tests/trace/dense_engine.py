"""A small engine of another kind: dense rows that are filled from the end, driven by the decisions of a trace.

Each fault of `FAULTS` is a mistake that such engines have had. `failing` runs a trace and compares its tensors.
"""

import numpy as np

from foreword.insight import Add, AppendBlocks, Commit, Correct, Remove, Replay, Step, first_difference


class DenseEngine:
    """Rows are 0 … n − 1; a freed row is filled by the last one. fault: a name of `FAULTS`, or None."""

    def __init__(self, header, fault=None):
        self.block_size, self.fault = header.kv_groups[0].block_size, fault
        self.width = -(-header.max_model_len // self.block_size)
        self.tokens = np.zeros((header.max_num_reqs, header.max_model_len + 8), np.int64)
        self.blocks = np.zeros((header.max_num_reqs, self.width), np.int64)
        self.num_blocks = np.zeros(header.max_num_reqs, np.int64)
        self.known = np.zeros(header.max_num_reqs, np.int64)
        self.computed = np.zeros(header.max_num_reqs, np.int64)
        self.rows = []  # ids
        self.step = None

    def apply(self, event):
        """Apply an event; of a step its tensors."""
        match event:
            case Add():
                self.rows.append(event.req_id)
                row = len(self.rows) - 1
                tokens = [*event.prompt_token_ids, *event.output_token_ids]
                self.tokens[row, : len(tokens)] = tokens
                self.known[row], self.computed[row] = len(tokens), event.num_computed_tokens
                if self.fault == "a resumed request is one position ahead" and len(event.output_token_ids):
                    self.computed[row] += len(tokens) - event.num_computed_tokens > 1
                self.num_blocks[row] = 0
                self.append(row, event.block_ids[0])
            case AppendBlocks():
                row = self.rows.index(event.req_id)
                if not (self.fault == "blocks of the last row are lost" and row == len(self.rows) - 1 and row > 1):
                    self.append(row, event.block_ids[0])
            case Remove():
                self.remove(self.rows.index(event.req_id))
            case Correct():
                row = self.rows.index(event.req_id)
                self.known[row], self.computed[row] = event.num_tokens, event.num_computed_tokens
            case Step():
                return self.prepare(event)
            case Commit():
                self.commit(event)
        return None

    def append(self, row, ids):
        held = self.num_blocks[row]
        self.blocks[row, held : held + len(ids)] = ids
        self.num_blocks[row] += len(ids)

    def remove(self, row):
        last = len(self.rows) - 1
        moved = self.rows.pop()
        if row == last:
            return
        self.rows[row] = moved
        lacks = self.fault == "a moved row lacks its last token"
        self.tokens[row, : self.known[last] - lacks] = self.tokens[last, : self.known[last] - lacks]
        if self.fault != "a moved row keeps the blocks that were there":
            self.blocks[row] = self.blocks[last]
        for column in (self.num_blocks, self.known, self.computed):
            column[row] = column[last]

    def prepare(self, event):
        self.step = event
        ids, positions, slots, logits, end = [], [], [], [], 0
        for req_id, count in zip(event.req_ids, event.counts, strict=True):
            row, drafts = self.rows.index(req_id), list(event.draft_tokens.get(req_id, ()))
            if self.fault == "the last draft is not staged" and len(drafts) > 1:
                drafts[-1] = 0
            self.tokens[row, self.known[row] : self.known[row] + len(drafts)] = drafts
            at = np.arange(self.computed[row], self.computed[row] + count)
            ids += self.tokens[row, at].tolist()
            positions += at.tolist()
            slots += (self.blocks[row, at // self.block_size] * self.block_size + at % self.block_size).tolist()
            end += count
            wrong = self.fault == "the first of several requests has the logits before" and not logits
            wrong &= len(event.req_ids) > 1 and count > 1
            logits += list(range(end - 1 - len(drafts) - wrong, end - wrong))
        return {"input_ids": ids, "positions": positions, "slot_mapping": [slots], "logits_indices": logits}

    def commit(self, event):
        for req_id, count in zip(self.step.req_ids, self.step.counts, strict=True):
            if req_id not in self.rows:
                continue
            row, drafts = self.rows.index(req_id), len(self.step.draft_tokens.get(req_id, ()))
            tokens = event.tokens.get(req_id, ())
            self.tokens[row, self.known[row] : self.known[row] + len(tokens)] = tokens
            self.known[row] += len(tokens)
            rejected = drafts + 1 - max(len(tokens), 1)
            if self.fault == "rejected drafts stay":
                rejected = max(rejected - 1, 0)
            self.computed[row] += count - rejected


FAULTS = (
    "a moved row keeps the blocks that were there",
    "a moved row lacks its last token",
    "a resumed request is one position ahead",
    "the last draft is not staged",
    "the first of several requests has the logits before",
    "blocks of the last row are lost",
    "rejected drafts stay",
)


def failing(fault):
    """The test whether the engine with a fault prepares other tensors than the definition."""

    def first(trace):
        replay, engine = Replay(trace.header, max_num_reqs=len(trace.events)), DenseEngine(trace.header, fault)
        for event in trace.events:
            batch, tensors = replay.apply(event), engine.apply(event)
            if batch is not None and any(first_difference(batch, name, tensors[name]) for name in tensors):
                return replay.num_steps - 1
        return None

    return first


def moved_row(trace):
    """A predicate for command lines: the first fault."""
    return failing(FAULTS[0])(trace)
