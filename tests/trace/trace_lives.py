"""Random traffic on the input layer, recorded as traces."""

from random import Random

from foreword.batch import BlockOps, ContextParallel, InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.trace.events import Correct
from foreword.trace.recorder import TraceRecorder

GROUPS = (
    (KVGroup(4),),
    (KVGroup(2), KVGroup(3, sliding_window=5)),
    (KVGroup(4), KVGroup(1, recurrent=True)),
    (KVGroup(2, context_parallel=True), KVGroup(4)),
)
VOCAB = 50


class Life:
    """An engine of random decisions, whose steps are recorded. Blocks are never used twice, so no step is wrong."""

    def __init__(self, path, seed, *, tensors=True, **header):
        self.rng = rng = Random(seed)
        groups = rng.choice(GROUPS)
        spread = any(group.context_parallel for group in groups)
        self.states = RequestStates(
            max_num_reqs=rng.randint(2, 5),
            max_model_len=40,
            vocab_size=VOCAB,
            kv_groups=groups,
            max_num_draft_tokens=rng.choice((0, 3)),
            context_parallel=ContextParallel(2, rng.randint(0, 1)) if spread else None,
            null_block=rng.choice((0, -1)),
        )
        self.buffers = InputBuffers.for_states(self.states, 48)
        self.trace = TraceRecorder(path, self.states, 48, **header)
        self.has_tensors = tensors
        self.next_block = self.next_id = 1
        self.preempted = {}  # id → (prompt, outputs)
        self.out = []  # ids that were preempted since the last step

    def tokens(self, count):
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def blocks(self, held, num_tokens):
        """New blocks per group, so that each can hold this many tokens."""
        out = []
        for table, have in zip(self.states.block_tables, held, strict=True):
            count = max(-(-num_tokens // table.tokens_per_block) - have, 0)
            out.append(list(range(self.next_block, self.next_block + count)))
            self.next_block += count
        return out

    def admit(self):
        if self.preempted and self.rng.random() < 0.7:
            req_id, (prompt, outputs) = self.preempted.popitem()
        else:
            req_id, prompt, outputs = f"r{self.next_id}", self.tokens(self.rng.randint(1, 20)), []
            self.next_id += 1
        known = len(prompt) + len(outputs)
        computed = self.rng.randint(0, known - 1) if self.rng.random() < 0.3 else 0
        blocks = self.blocks([0] * len(self.states.block_tables), known)
        self.states.add_request(NewRequest(req_id, prompt, blocks, outputs, computed))

    def leave(self, req_id):
        s, row = self.states, self.states.row_of(req_id)
        if self.rng.random() < 0.5:
            prompt, known = int(s.prompt_len[row]), int(s.num_tokens[row])
            tokens = s.token_ids[row, :known].tolist()
            self.preempted[req_id] = tokens[:prompt], tokens[prompt:]
            self.out.append(req_id)
        s.remove_request(req_id)

    def correct(self, req_id):
        """Take back outputs and computed tokens."""
        s, row = self.states, self.states.row_of(req_id)
        least = max(int(s.prompt_len[row]), int(s.num_tokens[row]) - 2)
        tokens = s.token_ids[row, : self.rng.randint(least, int(s.num_tokens[row]))].tolist()
        computed = self.rng.randint(0, min(int(s.num_computed_tokens[row]), len(tokens) - 1))
        s.rewrite(req_id, tokens, computed)
        self.trace.write(Correct(req_id=req_id, num_tokens=len(tokens), num_computed_tokens=computed))

    def step(self):
        s, rng = self.states, self.rng
        while len(s) < s.max_num_reqs and rng.random() < 0.6:
            self.admit()
        plan, drafts, left = {}, {}, 48
        for req_id in rng.sample(s.req_ids, rng.randint(0, len(s))):
            row = s.row_of(req_id)
            room = int(s.num_tokens[row]) - int(s.num_computed_tokens[row])
            count = rng.choice((room, rng.randint(1, room)))
            if count == room and s.num_tokens[row] < 34 and s.max_num_draft_tokens and rng.random() < 0.5:
                drafts[req_id] = self.tokens(rng.randint(1, 3))
                count += len(drafts[req_id])
            if count <= left:
                plan[req_id] = count
                left -= count
            else:
                drafts.pop(req_id, None)
        for req_id, count in plan.items():
            row = s.row_of(req_id)
            held = [int(t.num_blocks[row]) for t in s.block_tables]
            s.append_blocks(req_id, self.blocks(held, int(s.num_computed_tokens[row]) + count))
        ops = BlockOps.of([7], [(5, 6)], null_block=s.null_block) if rng.random() < 0.2 else BlockOps.NONE
        pad_to = (48, s.max_num_reqs) if rng.random() < 0.2 else None
        batch = prepare_inputs(
            s, plan, self.buffers, draft_tokens=drafts or None, pad_to=pad_to, block_ops=ops, gather_block_tables=True
        )
        self.trace.step(batch, None if self.has_tensors else {}, preempted=self.out)
        self.out = []
        sampled = {}
        for req_id, count in plan.items():
            row, ids = s.row_of(req_id), drafts.get(req_id, [])
            if int(s.num_computed_tokens[row]) + count - len(ids) == int(s.num_tokens[row]):
                sampled[req_id] = ids[: rng.randint(0, len(ids))] + self.tokens(1)
        s.commit(batch, sampled)
        self.trace.commit(batch, sampled)
        for req_id in s.req_ids:
            if s.num_tokens[s.row_of(req_id)] > 36 or rng.random() < 0.1:
                self.leave(req_id)
            elif rng.random() < 0.1:
                self.correct(req_id)
        if rng.random() < 0.2:
            s.condense()

    def run(self, num_steps):
        """Make steps until there are so many, and close the trace."""
        for _ in range(num_steps):
            self.step()
        self.trace.close()
        return self
