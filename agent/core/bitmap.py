"""`Bitmap`, an immutable set of CPU, GPU or NUMA node ids, and the two searches on it: in C, or
their Python twins on request."""

from typing import TYPE_CHECKING

from agent import PURE_PYTHON

if TYPE_CHECKING or PURE_PYTHON:
    from agent.core._bitmap_py import MAX_ID, Bitmap
    from agent.core._search_py import MAX_SUBSETS, choose_cpus, choose_subset
else:
    from agent.core._bitmap import MAX_ID, MAX_SUBSETS, Bitmap, choose_cpus, choose_subset

__all__ = ["MAX_ID", "MAX_SUBSETS", "Bitmap", "choose_cpus", "choose_subset"]
