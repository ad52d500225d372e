"""The kernels run in Triton's interpreter: the variable is read when a kernel's module is imported."""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
for part in (".", "batch", "kernels"):  # the generator of random lives, the small random models
    sys.path.append(str(Path(__file__).parents[1] / part))
