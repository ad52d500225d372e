"""Print the reference page: ``python -m foreword.batch.spec > docs/tensors.md``."""

from foreword.batch.spec import TENSORS, render

print(render(TENSORS), end="")
