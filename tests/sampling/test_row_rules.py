"""The rules of a row follow its requests, also after an interrupt while they were made."""

from typing import Any

import pytest
from sampling_rig import Rig, logits

from foreword.batch import SamplingParams


class InterruptedCore:
    """The rules of rows, whose `set` is interrupted before it sets them or after."""

    def __init__(self, core: Any, before: bool) -> None:
        self.core, self.before = core, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def set(self, row: int, *rules: Any) -> None:
        if not self.before:
            self.core.set(row, *rules)
        raise KeyboardInterrupt


@pytest.mark.parametrize("before", [True, False])
def test_rules_whose_making_was_interrupted_are_not_those_of_the_next_request_in_the_row(before: bool):
    rig, scores = Rig(), logits()
    ruled = SamplingParams(temperature=0, logit_bias={7: 100.0})
    rig.add("interrupted", ruled)
    rules = rig.processors._rules
    core, rules.core = rules.core, InterruptedCore(rules.core, before)
    with pytest.raises(KeyboardInterrupt):
        rig.draw(scores)
    rules.core = core
    row = rig.states.row_of("interrupted")
    rig.states.remove_request("interrupted")
    rig.add("next", SamplingParams(temperature=0))
    assert rig.states.row_of("next") == row
    assert rig.draw(scores).token_ids[0] == scores[0].argmax() != 7


@pytest.mark.parametrize("before", [True, False])
def test_a_request_whose_rules_were_interrupted_has_them_in_the_next_step(before: bool):
    rig, scores = Rig(), logits()
    rig.add("interrupted", SamplingParams(temperature=0, logit_bias={7: 100.0}))
    rules = rig.processors._rules
    core, rules.core = rules.core, InterruptedCore(rules.core, before)
    with pytest.raises(KeyboardInterrupt):
        rig.draw(scores)
    rules.core = core
    assert rig.draw(scores).token_ids[0] == 7
