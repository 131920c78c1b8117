"""numalet: a pod's CPUs and memory on the NUMA node of its GPUs."""

import os
from typing import Final

PURE_PYTHON: Final = os.environ.get("NUMALET_PURE_PYTHON") == "1"
"""Use the Python twin of the C core. Never chosen by itself: a missing C core is an error."""
