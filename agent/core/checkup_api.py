"""What the Kubernetes API says of a node, and what that means for the agent: each a finding."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agent.core.access import Access
from agent.core.findings import Finding, failed, ok, skipped, warning
from agent.core.koordinator import DEVICE_GROUP, DEVICE_PLURAL, DEVICE_VERSION
from agent.core.merging import MANAGED_BY, MANAGER
from agent.core.report import GROUP, PLURAL, VERSION
from agent.core.request import GPU_RESOURCE
from agent.core.strict_json import as_object, printable

_RUNTIME: Final = re.compile(r"([a-z-]{1,40})://v?([0-9]{1,4})\.([0-9]{1,4})[^ ]*", re.ASCII)
_NRI_SINCE: Final = {"containerd": ((1, 7), (2, 0)), "cri-o": ((1, 26), (1, 30))}
"""The versions since which NRI is there, and is on by default.

Source: the release notes of containerd and CRI-O.
"""


def judge_runtime(text: str) -> Finding:
    """`text` is `containerd://2.1.4`, as a Node's status has it."""
    name, shown = "runtime version", printable(text.replace("://", " "), 80)
    found = _RUNTIME.match(text)
    if not found or found[1] not in _NRI_SINCE:
        return warning(
            name,
            f"{shown or 'not told'}: whether it has NRI is not known",
            "The agent is made for containerd and CRI-O.",
        )
    version = int(found[2]), int(found[3])
    since, by_default = _NRI_SINCE[found[1]]
    if version >= by_default:
        return ok(name, f"{shown} has NRI, on by default")
    if version >= since:
        return ok(name, f"{shown} has NRI, off unless its configuration switches it on")
    return warning(
        name,
        f"{shown} has no NRI",
        f"CPUs can only be set through the cgroups. NRI comes with {found[1]} "
        f"{since[0]}.{since[1]}.",
    )


def judge_label(problem: str | None, label: str, node: str) -> Finding:
    """`problem` is what check_label says."""
    name = "node label"
    if problem is None:
        return ok(name, f"{label}=topology")
    return failed(
        name,
        problem,
        f"kubectl label node {node} {label}=topology --overwrite, once no pod holds GPUs of "
        "another plugin.",
    )


def judge_taint(node: Mapping[str, Any], key: str) -> Finding:
    name = "startup taint"
    if not key:
        return skipped(name, "startup_taint is empty: no taint is touched")
    taints = as_object(node.get("spec")).get("taints") or ()
    if not any(as_object(taint).get("key") == key for taint in taints):
        return ok(name, f"{key} is not on the node")
    return warning(
        name,
        f"{key} is still on the node: no pod comes that does not tolerate it",
        "The agent takes it away once kubelet has its GPUs. If that is long ago, see the findings "
        "agent and access.",
    )


_RIVAL: Final = re.compile(r"(nvidia\.com/(gpu|mig-)|aliyun\.com/gpu-|koordinator\.sh/gpu).*")


def judge_rivals(allocatable: Mapping[str, Any]) -> Finding:
    """`allocatable` is that of a Node's status."""
    name = "gpu resources"
    ours = printable(str(allocatable.get(GPU_RESOURCE, 0)), 20)
    rivals = {
        resource: printable(str(quantity), 20)
        for resource, quantity in sorted(allocatable.items())
        if _RIVAL.fullmatch(resource) and str(quantity) != "0"
    }
    if not rivals:
        return ok(name, f"{GPU_RESOURCE}: {ours}, and no other resource of GPUs")
    listed = ", ".join(f"{resource}: {rivals[resource]}" for resource in rivals)
    return failed(
        name,
        f"the node offers its GPUs twice: {listed} beside {GPU_RESOURCE}: {ours}",
        "Two plugins would give out the same GPU. End the other one on this node when no pod holds "
        "its resource any more.",
    )


def judge_crd(versions: Sequence[str], plurals: Iterable[str]) -> Finding:
    """`versions` are those of the group that are served, `plurals` what ours has."""
    name = "crd"
    if PLURAL in plurals:
        return ok(name, f"{PLURAL}.{GROUP}, served as {', '.join(versions)}")
    served = f"served as {', '.join(versions)} only, not as {VERSION}" if versions else "not there"
    return failed(
        name,
        f"{PLURAL}.{GROUP} is {served}: nothing is reported",
        "kubectl apply -k daemonset/crd. Nothing else waits for it.",
    )


def judge_koordinator_crd(plurals: Iterable[str]) -> Finding:
    name, crd = "koordinator crd", f"{DEVICE_PLURAL}.{DEVICE_GROUP}"
    if DEVICE_PLURAL in plurals:
        return ok(name, f"{crd} is served")
    advice = "Install Koordinator, or set koordinator_device to no."
    return failed(name, f"{crd} is not served as {DEVICE_VERSION}", advice)


def judge_access(asked: Sequence[Access], denied: Sequence[Access]) -> Finding:
    name = "access"
    if not denied:
        return ok(name, f"all {len(asked)} verbs that the agent needs are granted")
    listed = "; ".join(f"{access} ({access.why})" for access in denied)
    return failed(
        name,
        f"{len(denied)} of {len(asked)} verbs that the agent needs are not granted: {listed}",
        "Apply the ClusterRole and the bindings of daemonset/, and see that this is the token of "
        "the agent's own service account.",
    )


def judge_report(current: Mapping[str, Any] | None, foreign: bool) -> Finding:
    """`foreign` is what is_foreign says of the NodeResourceTopology of this node."""
    name = "report"
    if current is None:
        return ok(name, "there is none of this node yet; the agent will make it")
    if not foreign:
        return ok(name, "it is the agent's own")
    owners = _owners(current)
    seen = f"it belongs to {', '.join(owners) or 'another writer'}; the agent merges its GPUs in"
    if _gives_way(owners):
        return ok(name, seen)
    return warning(
        name,
        seen,
        "Reporters that write whole zones overwrite each other. Keep the other one off this node, "
        "and delete the object: the agent makes it anew.",
    )


def _gives_way(owners: Sequence[str]) -> bool:
    """Koordinator keeps what others write into its zones.

    Source: koordlet's merge of zone resources, Koordinator 1.8.
    """
    return bool(owners) and all(owner.lower().startswith("koord") for owner in owners)


def _owners(current: Mapping[str, Any]) -> list[str]:
    """Who else has the zones, by field managers and by label; after our own update of them, who has
    anything there. Sorted."""
    metadata = as_object(current.get("metadata"))
    fields = metadata.get("managedFields")
    entries = [entry for entry in fields if isinstance(entry, dict)] if fields else []
    of_zones = [one for one in entries if "f:zones" in as_object(one.get("fieldsV1"))]
    label = as_object(metadata.get("labels")).get(MANAGED_BY)
    names = _others([one.get("manager") for one in of_zones] + [label])
    return names or _others(one.get("manager") for one in entries)


def _others(names: Iterable[Any]) -> list[str]:
    return sorted({printable(one, 60) for one in names if isinstance(one, str)} - {"", MANAGER})
