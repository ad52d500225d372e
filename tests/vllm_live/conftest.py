"""The variables that Triton's interpreter needs before Triton is imported."""

import os
import sys

if directory := os.environ.get("TRITON_DIRECTORY"):
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(directory)
