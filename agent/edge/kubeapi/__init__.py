"""The Kubernetes API server: objects read, written and watched.

    objects.py    the objects that the agent reads and writes, by kind
    marks.py      the GPUs that an administrator marked there
    watching.py   the objects of one list, kept up to date
    client.py     calls with JSON in and out
    answers.py    bodies and refusals; foreign errors end there
    sockets.py    connections, and how they are ended
    server.py     where the server is, the token, the authorities

On urllib3: the client that Kubernetes publishes costs 24 MiB of memory.
"""

from agent.edge.kubeapi.client import Api
from agent.edge.kubeapi.marks import read_marks
from agent.edge.kubeapi.objects import (
    apply_config_map,
    apply_device,
    apply_topology,
    create_event,
    label_node,
    may,
    owner_of,
    read_config_map,
    read_device,
    read_node,
    read_topology,
    replace_topology,
    served,
    untaint_node,
)
from agent.edge.kubeapi.server import Server, find_server
from agent.edge.kubeapi.watching import Watch

__all__ = [
    "Api",
    "Server",
    "Watch",
    "apply_config_map",
    "apply_device",
    "apply_topology",
    "create_event",
    "find_server",
    "label_node",
    "may",
    "owner_of",
    "read_config_map",
    "read_device",
    "read_marks",
    "read_node",
    "read_topology",
    "replace_topology",
    "served",
    "untaint_node",
]
