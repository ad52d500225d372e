"""Print the reference page: ``python -m foreword.batch.proof.spec > docs/tensors.md``."""

from foreword.batch.proof.spec import TENSORS, render

print(render(TENSORS), end="")
