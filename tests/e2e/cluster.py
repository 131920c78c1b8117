"""A cluster of one node: the rig's node registered with a real API server, and the agent on it
with no more rights than its DaemonSet would have.

The agent runs as a process, not in the DaemonSet's pod. What it shows the API server is all the
same a pod's token: of a pod that is bound to the node, and that kubelet never starts.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.e2e import podresources
from tests.e2e.account import Account
from tests.e2e.agent import Option
from tests.e2e.apiclient import Client, Kubectl
from tests.e2e.apiserver import ADMIN, ApiServer, Deed, Etcd, Scheduler
from tests.e2e.containerd import Release
from tests.e2e.kubelet import NAMESPACE, NODE, Pod, make_pod
from tests.e2e.process import wait_for
from tests.e2e.report import (
    FINGERPRINT,
    TOPOLOGIES,
    TOPOLOGY,
    Counts,
    attributes,
    fingerprint,
    gpus_by_zone,
)
from tests.e2e.rig import Rig, prepared, rig_in, running

T = TypeVar("T")

_REPOSITORY = Path(__file__).parent.parent.parent
OVERLAYS = _REPOSITORY / "daemonset/overlays"

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
THIS_NODE = f"/api/v1/nodes/{NODE}"

SCHEDULE_LABEL = "ack.node.gpu.schedule"

_QUIET_S = 5

_LOGS = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What runs, and the questions that tests have."""

    rig: Rig
    etcd: Etcd
    server: ApiServer
    account: Account
    kubectl: Kubectl
    numbers: Iterator[int]
    options: Mapping[str, Option]
    """The agent's, about the cluster."""

    @property
    def admin(self) -> Client:
        return self.server.admin

    def wait(
        self, condition: Callable[[], T], what: str, timeout_s: float = 30, poll_s: float = 0.1
    ) -> T:
        rig = self.rig
        watched = [rig.agent, rig.kubelet, rig.containerd, self.server, self.etcd]
        return wait_for(condition, what, timeout_s, watched, poll_s)

    def node(self) -> dict[str, Any]:
        return dict(self.admin.get(THIS_NODE))

    def topology(self) -> dict[str, Any] | None:
        """The node's NodeResourceTopology, None where there is none."""
        found = self.admin.find(f"{TOPOLOGY}/{NODE}")
        return None if found is None else dict(found)

    def deeds(self, verbs: Sequence[str] = (), resource: str = "") -> list[Deed]:
        """What the agent has asked of the API server; all verbs and resources, or only these."""
        return [
            deed
            for deed in self.server.deeds(self.account.user)
            if (not verbs or deed.verb in verbs) and resource in ("", deed.resource)
        ]

    def gpus(self) -> dict[str, Counts]:
        """By zone: how many GPUs it has, how many are healthy, how many of these are free, counted
        from the machine's description and from what kubelet says."""
        machine, sound = self.rig.machine.facts, self.rig.healthy().keys()
        held = frozenset[str]().union(*self.rig.held().values())
        return {
            f"node-{node.id}": (len(all_), len(all_ & sound), len(all_ & sound - held))
            for node in machine.nodes
            if (all_ := {gpu.uuid for gpu in machine.gpus if gpu.node == node.id})
        }

    def reported_gpus(self) -> dict[str, Counts]:
        """The same as the report says: capacity, allocatable, available."""
        topology = self.topology()
        return {} if topology is None else gpus_by_zone(topology)

    def is_right(self) -> bool:
        """The report shows what kubelet says: GPUs by zone, and all pods of its list."""
        topology = self.topology()
        return (
            topology is not None
            and gpus_by_zone(topology) == self.gpus()
            and attributes(topology).get(FINGERPRINT) == self.fingerprint()
        )

    def wait_until_right(self, timeout_s: float = 30) -> float:
        """How long it took, in seconds."""
        start = time.monotonic()
        try:
            self.wait(self.is_right, "the report shows what kubelet says", timeout_s)
        except AssertionError as error:
            differ = f"it shows {self.reported_gpus()}, kubelet {self.gpus()}"
            raise AssertionError(f"{differ}\n{error}") from None
        return time.monotonic() - start

    def settle(self) -> None:
        """Waits until the agent has written nothing for a while."""
        moment, writes = time.monotonic(), len(self.writes())

        def quiet() -> bool:
            nonlocal moment, writes
            if (now := len(self.writes())) != writes:
                moment, writes = time.monotonic(), now
            return time.monotonic() > moment + _QUIET_S

        self.wait(quiet, "the agent writes nothing more", 60, poll_s=0.5)

    def fingerprint(self) -> str:
        """Of the pods in kubelet's list of who holds what."""
        return fingerprint(podresources.all_pods(self.rig.kubelet.pod_resources))

    def writes(self) -> list[Deed]:
        """What the agent has written or tried to write, of whatever kind."""
        return [deed for deed in self.deeds() if deed.verb not in ("get", "list", "watch")]

    def reports(self) -> int:
        """How often the agent has tried to write a NodeResourceTopology."""
        return len(self.deeds(["create", "update", "patch"], TOPOLOGIES))

    def post_pod(self, name: str, node: str | None = NODE, **how: Any) -> str:
        """Gives the node a pod of `make_pod` through the API server; the name that it gets. Without
        a node the pod is for a scheduler."""
        name = f"{name}-{next(self.numbers)}"
        pod = make_pod(name, **how)
        pod["spec"] |= {"nodeName": node} if node else {}
        self.admin.post(PODS, pod)
        return name

    def run_pods(self, *names: str, **how: Any) -> list[Pod]:
        """Posts pods, all in the same way, and waits until they run."""
        return self.rig.wait_until_running([self.post_pod(name, **how) for name in names])

    def delete_pod(self, name: str) -> None:
        """Returns at once, while it still ends."""
        self.admin.delete(f"{PODS}/{name}")

    def remove_pod(self, pod: Pod) -> None:
        self.delete_pod(pod.name)
        self.wait(lambda: pod.name not in self.rig.kubelet.pods(), f"{pod.name} is gone", 60)

    def remove_pods(self) -> None:
        """All of the tests, and waits until they are gone. Kubelet itself takes static pods out of
        the API server."""
        for pod in self.admin.get(PODS)["items"]:
            if "kubernetes.io/config.mirror" not in pod["metadata"].get("annotations", {}):
                self.delete_pod(pod["metadata"]["name"])
        self.rig.remove_pods()
        self.wait(lambda: not self.admin.get(PODS)["items"], "the API server has no pods", 60)

    def events(self, pod: str) -> list[dict[str, Any]]:
        """Those on a pod that the agent has written."""
        items = self.admin.get(f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
        return [
            item
            for item in items
            if item["involvedObject"]["name"] == pod and item["source"]["component"] == "numalet"
        ]

    @contextlib.contextmanager
    def scheduler(self) -> Iterator[None]:
        """kube-scheduler runs."""
        folder = self.rig.folder
        kubeconfig = self.server.kubeconfig("scheduler", "/CN=system:kube-scheduler")
        scheduler = Scheduler(folder / "bin/kube-scheduler", folder / "api", kubeconfig)
        with running(_LOGS, scheduler):
            scheduler.start()
            yield

    def revive(self) -> None:
        """Starts what does not run."""
        for process in (self.etcd, self.server):
            if not process.is_running():
                process.stop()
                process.start()
        self.server.wait_until_ready()
        self.rig.revive()


@contextlib.contextmanager
def running_cluster(library: str, overlay: Path) -> Iterator[Cluster]:
    """As `running_rig`, with the kustomization `overlay` applied to the API server.

    Raises RuntimeError as `running_rig` does.
    """
    with prepared(Release.BUILT) as folder, running_server(folder) as (etcd, server):
        kubectl = Kubectl(folder / "bin/kubectl", server.kubeconfig("kubectl", ADMIN))
        prepare_objects(server.admin, kubectl, overlay)
        account = Account(server, folder / "account")
        account.renew()
        agent: dict[str, Option] = {
            "kube_api": server.url,
            "service_account_dir": str(account.folder),
            "node_name": NODE,
        }
        kubeconfig = server.kubeconfig("kubelet", f"/O=system:nodes/CN=system:node:{NODE}")
        with rig_in(
            *(folder, library, Release.BUILT, agent), kubeconfig=kubeconfig, logs=_LOGS
        ) as rig:
            yield Cluster(
                rig=rig,
                etcd=etcd,
                server=server,
                account=account,
                kubectl=kubectl,
                numbers=itertools.count(),
                options=agent,
            )


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[tuple[Etcd, ApiServer]]:
    """In a folder that is prepared."""
    files = folder / "api"
    files.mkdir()
    etcd = Etcd(folder / "bin/etcd", files)
    server = ApiServer(folder / "bin/kube-apiserver", files, etcd)
    with running(_LOGS, etcd, server):
        etcd.start()
        server.start()
        server.wait_until_ready()
        yield etcd, server


def prepare_objects(admin: Client, kubectl: Kubectl, overlay: Path) -> None:
    """What a controller manager makes in the tests' namespace, and an administrator applies."""
    admin.post(
        f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
        {"metadata": {"name": "default"}, "automountServiceAccountToken": False},
    )
    kubectl("apply", "--kustomize", overlay)
