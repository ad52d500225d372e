"""Custom logits processors, and which requests processors apply to."""

import numpy as np
import pytest
from sampling_rig import Rig, V, logits

from foreword.batch import RequestError, SamplingParams, sampling_metadata
from foreword.batch.state.batch_update import AddedRow, BatchUpdate
from foreword.sampling import LogitRows, Processors, RowValues

GREEDY = SamplingParams(temperature=0.0)


class ForbidToken:
    """Forbids the token that a request names in extra_args."""

    extra_args = frozenset({"forbidden_token"})

    def __init__(self, states) -> None:
        self.rows: RowValues[int] = RowValues(states.max_num_reqs)
        self.calls = 0

    def update(self, change: BatchUpdate) -> None:
        self.rows.update(change, self._token_of)

    def apply(self, logits, at: LogitRows) -> None:
        self.calls += 1
        for i, row in enumerate(at.rows.tolist()):
            logits[i, self.rows[row]] = -np.inf

    def _token_of(self, added: AddedRow) -> int | None:
        return (added.params.extra_args or {}).get("forbidden_token") if added.params else None


def forbidding(token: int, **params) -> SamplingParams:
    return SamplingParams(temperature=0.0, extra_args={"forbidden_token": token}, **params)


def favourites(*tokens: int) -> np.ndarray:
    """Row i prefers tokens[i], then the token after it."""
    z = np.zeros((len(tokens), V), np.float32)
    for i, token in enumerate(tokens):
        z[i, token], z[i, token + 1] = 9, 5
    return z


def test_a_custom_processor_changes_the_requests_with_its_argument_alone():
    rig = Rig(GREEDY, forbidding(7), GREEDY, forbidding(30), custom=[ForbidToken])
    assert rig.draw(favourites(7, 7, 7, 7)).token_ids.tolist() == [7, 8, 7, 7]


def test_custom_processors_follow_the_rules_of_the_parameters():
    rig = Rig(forbidding(7, logit_bias={7: 50.0, 20: 40.0}), custom=[ForbidToken])
    assert rig.draw(favourites(3)).token_ids.tolist() == [20]


def test_every_row_of_a_request_with_drafts_is_processed():
    rig = Rig(GREEDY, forbidding(7), drafts=2, custom=[ForbidToken])
    sampled = rig.draw(favourites(7, 7, 7, 4, 7), {"0": [7], "1": [8, 4]})
    assert sampled.token_ids.tolist() == [[7, 7, -1], [8, 4, 8]]


@pytest.mark.parametrize("seed", range(5))
def test_processors_follow_their_requests_through_moves_and_departures(seed):
    rng = np.random.default_rng(seed)
    rig, forbidden, count = Rig(custom=[ForbidToken]), {}, 0
    for _ in range(80):
        match rng.choice(["add", "remove", "swap", "condense", "draw"]):
            case "add" if len(rig.states) < 8:
                token = int(rng.integers(V)) if rng.random() < 0.5 else None
                rig.add(f"r{count}", GREEDY if token is None else forbidding(token))
                forbidden[f"r{count}"] = token
                count += 1
            case "remove" if len(rig.states):
                rig.states.remove_request(str(rng.choice(rig.states.req_ids)))
            case "swap":
                rig.states.swap_rows(int(rng.integers(8)), int(rng.integers(8)))
            case "condense":
                rig.states.condense()
            case "draw" if len(rig.states):
                tokens = [forbidden[r] or int(rng.integers(V - 1)) for r in rig.states.req_ids]
                tokens = [min(t, V - 2) for t in tokens]
                wanted = [t + (forbidden[r] == t) for r, t in zip(rig.states.req_ids, tokens, strict=True)]
                assert rig.draw(favourites(*tokens)).token_ids.tolist() == wanted
            case _:
                pass


def test_a_step_without_requests_of_a_processor_does_not_run_it():
    rig = Rig(GREEDY, forbidding(7), custom=[ForbidToken])
    (custom,) = rig.sampling(rig.batch()).processors
    assert isinstance(custom, ForbidToken)
    batch = rig.batch(counts={"0": 1})
    assert rig.sampling(batch).processors == ()
    rig.sampler.sample(batch, logits(), rig.sampling(batch))
    assert custom.calls == 0


def test_requests_admitted_before_the_processors_are_made_count():
    rig = Rig(SamplingParams(temperature=0.0, logit_bias={4: 50.0}))
    processors = Processors(rig.states)
    processors.update()
    batch = rig.batch()
    sampling = processors.step(sampling_metadata(batch))
    assert rig.sampler.sample(batch, logits(), sampling).token_ids.tolist() == [4]
    processors.close()
    rig.processors.close()
    assert not rig.states.observers


def test_penalties_given_as_columns_apply():
    rig = Rig(None)
    columns = {"repetition_penalty": np.array([4.0], np.float32)}
    rig.states.sampling.set_columns(np.array([rig.states.row_of("0")], np.int32), columns)
    z = np.zeros((1, V), np.float32)
    z[0, 2], z[0, 9] = 5, 4  # 2 is in the prompt
    assert rig.draw(z).token_ids.tolist() == [9]


def test_an_argument_that_no_processor_reads_is_refused():
    rig = Rig(custom=[ForbidToken])
    rig.processors.check("a", forbidding(3))
    with pytest.raises(RequestError, match=r"request 'a': extra_args = 'colour'.*forbidden_token"):
        rig.processors.check("a", SamplingParams(extra_args={"colour": 1}))
