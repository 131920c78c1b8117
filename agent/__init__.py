"""numalet: a pod's CPUs and memory on the NUMA node of its GPUs."""

import os
from typing import Final

PURE_PYTHON: Final = os.environ.get("NUMALET_PURE_PYTHON") == "1"
"""Use the Python twin of the C core. Never chosen by itself: a missing C core is an error."""

# Read when gRPC is imported. It would start its threads anew in the child that asks the GPU driver,
# and log every goodbye of a peer.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
