"""A small kube-apiserver over real HTTP or HTTPS on loopback, which a test sees and disturbs.

It does what kube-apiserver 1.36 does, as far as an agent can tell: objects of the resources that it
serves, with lists in pages, watches, patches, server-side apply, users and what they may do. Of
pods, nodes and the like it knows no schema.

    with FakeApiServer() as server:
        server.put("nodes", {"metadata": {"name": "node-1"}})
        server.fail(refuse(429, retry_after_s=1), times=2)
        …
        assert [request.path for request in server.writes] == []

    server.py     FakeApiServer: its life, disturbing it, seeing what was asked
    http.py       connections, TLS, answers on the wire
    faults.py     what can go wrong with an answer
    answering.py  from a request to its answer; watching.py for watches
    cluster.py    what is served, to whom, and a test's own way to the objects
    store.py      the objects and how they change; fields.py: patches, and who owns which field

Source: Kubernetes API conventions, and k8s.io/apiserver of Kubernetes 1.36.
"""

from agent.fakes.apiserver.access import ADMIN, Rule, User
from agent.fakes.apiserver.faults import (
    Answer,
    Fault,
    cut,
    disconnect,
    events,
    hang,
    refuse,
    say,
    slow,
    watch_error,
)
from agent.fakes.apiserver.requests import Request
from agent.fakes.apiserver.resources import BUILT_IN, KOORDINATOR_DEVICES, TOPOLOGIES
from agent.fakes.apiserver.server import FakeApiServer, lay_out_account
from agent.fakes.apiserver.store import Resource, StatusError

__all__ = [
    "ADMIN",
    "BUILT_IN",
    "KOORDINATOR_DEVICES",
    "TOPOLOGIES",
    "Answer",
    "FakeApiServer",
    "Fault",
    "Request",
    "Resource",
    "Rule",
    "StatusError",
    "User",
    "cut",
    "disconnect",
    "events",
    "hang",
    "lay_out_account",
    "refuse",
    "say",
    "slow",
    "watch_error",
]
