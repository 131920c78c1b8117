"""Set-up for all tests."""

import os
import shutil
from pathlib import Path

import pytest

import agent  # noqa: F401 (sets what gRPC reads when it is imported)
from agent.fakes import nvml

MEMORY = "/dev/shm"
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 1 << 28:
    # A machine is thousands of small files; on a disk, writing them is most of the suite's time.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


@pytest.fixture(scope="session")
def library() -> str:
    """The fake libnvidia-ml.so.1; not below the temporary folder, which may forbid execution."""
    return str(nvml.build(Path(__file__).parent.parent / ".cache" / "nvml"))
