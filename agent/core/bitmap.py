"""`Bitmap`, an immutable set of CPU or NUMA node ids: the C type, or its Python twin on request."""

from typing import TYPE_CHECKING

from agent import PURE_PYTHON

if TYPE_CHECKING or PURE_PYTHON:
    from agent.core._bitmap_py import MAX_ID, Bitmap
else:
    from agent.core._bitmap import MAX_ID, Bitmap

__all__ = ["MAX_ID", "Bitmap"]
