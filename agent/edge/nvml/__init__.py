"""What the GPU driver says of its GPUs, through NVML; nothing else imports pynvml.

Nobody can interrupt a call into a driver: one lost GPU can hang it for ever, and a library that
does not fit the driver can crash. So the driver is asked by a forked child, which may be killed,
and there each GPU by a thread of its own, which may be left behind. This process never loads the
driver's library.

    parent    fork ── wait for the answer, then reap or abandon the child
    child     init ─┬─ GPU 0 ─┬─ pairs of GPU 0 ─┬─ send the answer
                    ├─ GPU 1 ─┼─ pairs of GPU 1 ─┤
                    └─ …      ┴─ …               ┘
    by        50 %            80 %               90 % of `timeout_s`

`read_driver` ends there. With `watch_driver` the child goes on in the same session:

    parent    tell what comes, until the child ends, falls silent, or `stop` is given
    child     send what is news at once, and all GPUs every `probe_s`
                ├─ GPU 0: probe it every `probe_s`
                ├─ GPU 1: …
                └─ events: wait for Xids

The child ends with the thread that forked it, whatever ends that. An open session keeps the driver
from being unloaded, and may keep a GPU from being reset: whoever wants that ends the agent before.
"""

from agent.edge.nvml.probing import Pace
from agent.edge.nvml.reading import read_driver
from agent.edge.nvml.watching import watch_driver

__all__ = ["Pace", "read_driver", "watch_driver"]
