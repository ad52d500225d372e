"""The specification of a step as data: every tensor once, with its shape, meaning, padding, range and relations.

`foreword.batch.validate` checks a batch against it, ``python -m foreword.batch.proof.spec`` prints the reference page,
and property tests draw their corruptions from it. Nothing of a step imports it.
"""

from foreword.batch.proof.spec.page import render
from foreword.batch.proof.spec.request import REQUEST
from foreword.batch.proof.spec.system import SYSTEM
from foreword.batch.proof.spec.tensor import SYMBOLS, Level, Relation, TensorSpec
from foreword.batch.proof.spec.token import EXPLAINED, LOGIT, TOKEN

TENSORS: tuple[TensorSpec, ...] = (*SYSTEM, *REQUEST, *TOKEN, *LOGIT, *EXPLAINED)

__all__ = ["SYMBOLS", "TENSORS", "Level", "Relation", "TensorSpec", "render"]
