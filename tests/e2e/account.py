"""The agent's service account, with tokens like the one that its pod would get.

A token is of a pod that is bound to the node, and that kubelet never starts.
"""

import itertools
from pathlib import Path

from tests.e2e.apiclient import Client
from tests.e2e.apiserver import ApiServer
from tests.e2e.kubelet import NODE, make_pod

SYSTEM = "numalet-system"
ACCOUNT = "numalet"


class Account:
    """With a folder like the one that Kubernetes mounts into pods."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.user = f"{SYSTEM}:{ACCOUNT}"
        self._server = server
        self._pods = (f"agent-{number}" for number in itertools.count())
        (folder / "ca.crt").write_bytes(server.authority.file.read_bytes())
        self._pod = ""

    def renew(self) -> None:
        """A token of a pod that is new, whatever was before; the older pod's is void then."""
        old, self._pod = self._pod, next(self._pods)
        fresh = self.folder / "fresh"
        fresh.write_text(mint_token(self._server.admin, self._pod, NODE))
        fresh.rename(self.folder / "token")
        if old:
            self._server.admin.delete(
                f"/api/v1/namespaces/{SYSTEM}/pods/{old}?gracePeriodSeconds=0"
            )

    def client(self) -> Client:
        """Asks as the agent does."""
        return self._server.client((self.folder / "token").read_text())


def mint_token(admin: Client, name: str, node: str) -> str:
    """A token of the agent's service account, bound to a new pod of this name on the node; kubelet
    refuses the pod, since the node is not what the pod selects."""
    pod = make_pod(name)
    pod["spec"] |= {
        "serviceAccountName": ACCOUNT,
        "automountServiceAccountToken": False,
        "nodeName": node,
        "nodeSelector": {"numalet.test/never": "true"},
    }
    made = admin.post(f"/api/v1/namespaces/{SYSTEM}/pods", pod)
    bound = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": made["metadata"]["uid"]}
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600, "boundObjectRef": bound},
    }
    account = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{ACCOUNT}"
    return str(admin.post(f"{account}/token", request)["status"]["token"])
