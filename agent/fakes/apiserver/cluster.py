"""What there is behind the API, apart from any network."""

from agent.fakes.apiserver.access import User
from agent.fakes.apiserver.fields import Object
from agent.fakes.apiserver.resources import BUILT_IN, TOPOLOGIES
from agent.fakes.apiserver.store import Resource, Store, Writer

NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system")


class Cluster:
    """What a test may switch at any time:

    users      by bearer token; while there are none, everybody is an administrator
    resources  what is served; a resource that is missing here is a CRD that is not installed
    """

    def __init__(self) -> None:
        self.resources: list[Resource] = [*BUILT_IN, TOPOLOGIES]
        self.users: dict[str, User] = {}
        self.store = Store()
        for name in NAMESPACES:
            self.put("namespaces", {"metadata": {"name": name}})

    def resource(self, plural: str) -> Resource:
        return next(one for one in self.resources if one.plural == plural)

    def put(self, plural: str, item: Object, manager: str = "test") -> Object:
        """Creates or replaces an object, status and all, in its namespace (made if missing).

        One without a namespace is in `default`, if it is of a namespaced resource; a new one may
        say its uid.
        """
        resource, meta = self.resource(plural), item["metadata"]
        namespace = meta.get("namespace", "default") if resource.namespaced else ""
        self._make_namespace(namespace)
        version = resource.versions[-1]
        whole = item | {"apiVersion": resource.api_version(version), "kind": resource.kind}
        writer = Writer(manager=manager, version=version, everything=True)
        name = meta.get("name", "")
        old = self.store.find(resource, namespace, name)
        if not old:
            return self.store.create(resource, namespace, whole, writer)
        whole["metadata"] = {"resourceVersion": old["metadata"]["resourceVersion"]} | meta
        return self.store.replace(resource, namespace, name, whole, writer)

    def _make_namespace(self, name: str) -> None:
        if name and not self.get("namespaces", name):
            self.put("namespaces", {"metadata": {"name": name}})

    def get(self, plural: str, name: str, namespace: str = "default") -> Object | None:
        resource = self.resource(plural)
        return self.store.find(resource, namespace if resource.namespaced else "", name)

    def all(self, plural: str, namespace: str = "") -> list[Object]:
        return self.store.select(self.resource(plural), namespace, lambda item: True)[1]

    def remove(self, plural: str, name: str, namespace: str = "default") -> None:
        resource = self.resource(plural)
        self.store.delete(resource, namespace if resource.namespaced else "", name, {})
