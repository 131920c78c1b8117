"""A real API server with its etcd, on the loopback: started, stopped, asked, and what it noted.

Nobody is anonymous; users are what their client certificates or tokens say, and may do what RBAC
and the node authorizer allow. There is no controller manager: what it would make, a test makes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.apiclient import TESTS, ApiError, Client
from tests.e2e.certificates import Certificate, issue, make_authority, make_key
from tests.e2e.process import Process, free_port, wait_for

ADMIN = "/O=system:masters/CN=admin"

_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """A request that the server has answered; `resource` with its group and subresource, as RBAC
    would name them: noderesourcetopologies.topology.node.k8s.io, pods/status."""

    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    status: int


class Etcd(Process):
    """It syncs nothing to the disk, and so survives a restart of its own, but not the machine's."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self.url, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        super().__init__(
            [
                binary,
                f"--data-dir={folder / 'data'}",
                "--unsafe-no-fsync",
                *(f"--{flag}-client-urls={self.url}" for flag in ("listen", "advertise")),
                *(f"--{flag}-peer-urls={peers}" for flag in ("listen", "initial-advertise")),
                f"--initial-cluster=default={peers}",
            ],
            folder / "etcd.log",
        )


class Scheduler(Process):
    """kube-scheduler as it is, which nothing needs but the test that starts it."""

    def __init__(self, binary: Path, folder: Path, kubeconfig: Path) -> None:
        files = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        super().__init__(
            [
                binary,
                *(f"--{flag}={kubeconfig}" for flag in files),
                "--bind-address=127.0.0.1",
                f"--secure-port={free_port()}",
                "--leader-elect=false",
            ],
            folder / "scheduler.log",
        )


class ApiServer(Process):
    """Its port, keys and users are kept over restarts, and with a running etcd also its objects."""

    def __init__(self, binary: Path, folder: Path, etcd: Etcd) -> None:
        self._folder = folder
        self._port = free_port()
        self._audit = folder / "audit.log"
        self.url = f"https://127.0.0.1:{self._port}"
        self.authority = make_authority(folder, "numalet-e2e")
        self.admin = Client(self.url, self.authority.file, self.certificate("admin", ADMIN))
        super().__init__(
            [binary, *(f"--{flag}" for flag in self._flags(etcd.url))], folder / "apiserver.log"
        )

    def _flags(self, etcd: str) -> list[str]:
        folder, serving = self._folder, self.certificate("serving", "/CN=kube-apiserver")
        policy, accounts = folder / "audit-policy.json", make_key(folder / "accounts.key")
        policy.write_text(json.dumps(_AUDIT_POLICY))
        return [
            f"etcd-servers={etcd}",
            "bind-address=127.0.0.1",
            f"secure-port={self._port}",
            "endpoint-reconciler-type=none",
            "service-cluster-ip-range=10.0.0.0/24",
            f"tls-cert-file={serving.file}",
            f"tls-private-key-file={serving.key}",
            f"client-ca-file={self.authority.file}",
            "anonymous-auth=false",
            "authorization-mode=Node,RBAC",
            "enable-admission-plugins=NodeRestriction",
            "disable-admission-plugins=TaintNodesByCondition",
            "service-account-issuer=https://kubernetes.default.svc",
            f"service-account-key-file={accounts}",
            f"service-account-signing-key-file={accounts}",
            f"audit-policy-file={policy}",
            f"audit-log-path={self._audit}",
            "shutdown-delay-duration=0s",
        ]

    def stop(self, timeout_s: float = 1) -> int | None:
        """Soon: it would wait for its clients, and has nothing to lose."""
        return super().stop(timeout_s)

    def certificate(self, name: str, subject: str) -> Certificate:
        """Anew from the cluster's authority."""
        return issue(self.authority, self._folder, name, subject)

    def kubeconfig(self, name: str, subject: str) -> Path:
        """For the user of the subject."""
        certificate = self.certificate(name, subject)
        facts = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "contexts": [{"name": name, "context": {"cluster": "e2e", "user": name}}],
            "clusters": [
                {
                    "name": "e2e",
                    "cluster": {
                        "server": self.url,
                        "certificate-authority": str(self.authority.file),
                    },
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate": str(certificate.file),
                        "client-key": str(certificate.key),
                    },
                }
            ],
        }
        path = self._folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(facts))
        return path

    def client(self, token: str) -> Client:
        return Client(self.url, self.authority.file, token=token)

    def wait_until_ready(self) -> None:
        wait_for(self._is_ready, "the API server is ready", 90, [self])

    def _is_ready(self) -> bool:
        try:
            return bool(self.admin.get("/readyz") == "ok")
        except ApiError:
            return False

    def deeds(self, user: str) -> list[Deed]:
        """What the service account `namespace:name` has asked since the server's first start, but
        not what a test has in its name; a watch counts from when it is open."""
        text = self._audit.read_text() if self._audit.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        events = [json.loads(line) for line in lines if f"system:serviceaccount:{user}" in line]
        return [_deed(event) for event in events if _counts(event)]


def _counts(event: Mapping[str, Any]) -> bool:
    ended = event["verb"] == "watch" and event["stage"] != "ResponseStarted"
    return not ended and event.get("userAgent") != TESTS


def _deed(event: Mapping[str, Any]) -> Deed:
    about = event.get("objectRef", {})
    parts = [about.get("resource", event["requestURI"]), about.get("apiGroup")]
    resource = ".".join(part for part in parts if part)
    if subresource := about.get("subresource"):
        resource += f"/{subresource}"
    return Deed(
        user=event["user"]["username"],
        verb=event["verb"],
        resource=resource,
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        status=event["responseStatus"]["code"],
    )
