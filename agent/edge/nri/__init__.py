"""The container runtime's plugin interface, NRI: cpusets for containers, from their creation on.

    plugin.py       one thread: connects, registers, answers, and comes again after a restart
    messages.py     NRI's messages ↔ our values
    connection.py   calls over a socket, both ways
    frames.py       bytes ↔ calls

The runtime asks all its plugins one after the other, under one lock for the whole node, and throws
out who has not answered within 2 s; the container is created then, unpinned. An error in answer to
a creation or an event fails the pod. So every call is answered from memory, at once, and the only
error that is ever answered is a refusal that is meant.

We never call UpdateContainers: up to NRI 0.12.0 it can deadlock the runtime.
"""

from agent.edge.nri.messages import Asked
from agent.edge.nri.plugin import Callbacks, NriPlugin

__all__ = ["Asked", "Callbacks", "NriPlugin"]
