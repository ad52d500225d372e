"""The kernels run in Triton's interpreter, or with TESTS_ON_GPU=1 on the GPU.

The interpreter's variable is read when a kernel's module is imported.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0" if os.environ.get("TESTS_ON_GPU") == "1" else "1"
for part in (".", "batch", "kernels"):  # the generator of random traffic, the small random models
    sys.path.append(str(Path(__file__).parents[1] / part))
