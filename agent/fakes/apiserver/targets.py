"""What a path of the API names, and what discovery tells of what is served."""

from collections.abc import Iterable
from dataclasses import dataclass

from agent.fakes.apiserver.access import Access
from agent.fakes.apiserver.fields import Object
from agent.fakes.apiserver.store import Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A path's parts, whether served or not. `name` and what is after it may be empty."""

    group: str
    version: str
    namespace: str
    plural: str
    name: str
    subresource: str

    def access(self, verb: str) -> Access:
        return Access(
            verb=verb,
            group=self.group,
            resource=self.plural,
            subresource=self.subresource,
            namespace=self.namespace,
            name=self.name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A path of what is served."""

    path: Path
    resource: Resource

    @property
    def namespace(self) -> str:
        return self.path.namespace

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def key(self) -> tuple[Resource, str, str]:
        return self.resource, self.path.namespace, self.path.name

    @property
    def api_version(self) -> str:
        return self.resource.api_version(self.path.version)

    def show(self, item: Object) -> Object:
        """An object in the version asked for."""
        kind = {"apiVersion": self.api_version, "kind": self.resource.kind}
        return kind | item | kind


def split(path: str) -> Path | None:
    """None for a path that names no resource."""
    match path.strip("/").split("/"):
        case ["api", version, *rest]:
            group = ""
        case ["apis", group, version, *rest]:
            pass
        case _:
            return None
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    if not 1 <= len(rest) <= 3 or "" in rest:
        return None
    plural, name, subresource = (*rest, "", "")[:3]
    return Path(
        group=group,
        version=version,
        namespace=namespace,
        plural=plural,
        name=name,
        subresource=subresource,
    )


def find_target(resources: Iterable[Resource], path: Path) -> Target | None:
    """None for what is not served."""
    for resource in resources:
        if (resource.group, resource.plural) != (path.group, path.plural):
            continue
        if path.version not in resource.versions:
            continue
        fits = resource.namespaced if path.namespace else not (path.name and resource.namespaced)
        known = ("", "status") if resource.has_status else ("",)
        if fits and path.subresource in known:
            return Target(path=path, resource=resource)
    return None


# --- discovery ------------------------------------------------------------------------------------


def discover(resources: Iterable[Resource], path: str) -> Object | None:
    """None for a path that is not about what is served."""
    served = list(resources)
    groups = {one.group: one.versions for one in served if one.group}
    match path.strip("/").split("/"):
        case ["version"]:
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0", "platform": "fake"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            listed = [_group(name, groups[name]) for name in sorted(groups)]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        case ["apis", name] if name in groups:
            return {"kind": "APIGroup", "apiVersion": "v1"} | _group(name, groups[name])
        case ["api", version]:
            return _resource_list(served, "", version)
        case ["apis", name, version]:
            return _resource_list(served, name, version)
    return None


def _group(name: str, versions: Iterable[str]) -> Object:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[-1]}


def _resource_list(served: Iterable[Resource], group: str, version: str) -> Object | None:
    listed = [one for one in served if one.group == group and version in one.versions]
    if not listed:
        return None
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": listed[0].api_version(version),
        "resources": [entry for one in listed for entry in _describe(one)],
    }


def _describe(resource: Resource) -> list[Object]:
    entry: Object = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "kind": resource.kind,
        "namespaced": resource.namespaced,
        "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
    }
    status = {"name": f"{resource.plural}/status", "verbs": ["get", "patch", "update"]}
    return [entry, entry | status] if resource.has_status else [entry]
