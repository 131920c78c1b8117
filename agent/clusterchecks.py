"""The doctor's checks of what the Kubernetes API says of this node, and of what it lets us do."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final

from agent.config import Config, node_name
from agent.core import checkup_api
from agent.core.access import Access, Duty, needed
from agent.core.ack import SCHEDULE_LABEL, check_label
from agent.core.findings import Finding, failed, ok, skip, skipped, warning
from agent.core.koordinator import DEVICE_GROUP, DEVICE_VERSION
from agent.core.report import GROUP, VERSION, is_foreign
from agent.edge.kubeapi import Api, find_server
from agent.edge.kubeapi.objects import may, read_node, read_topology, served
from agent.errors import KubeApiError

_CALL_S: Final = 2.0
_ABOUT_NODE: Final = ("runtime version", "node label", "startup taint", "gpu resources")
_ABOUT_API: Final = ("crd", "access", "report")


def check_cluster(config: Config) -> Iterator[Finding]:
    server = find_server(config.kube_api, config.service_account_dir)
    if server is None:
        yield warning(
            "api server",
            "it is not known where it is: nothing is reported",
            "Run this in the agent's pod (kubectl exec), or set kube_api and service_account_dir.",
        )
        yield from skip(("node", *_ABOUT_NODE, *_ABOUT_API), "there is no API server to ask")
        return
    with closing(Api(server, timeout_s=_CALL_S)) as api:
        yield from _check_api(config, api)


def _check_api(config: Config, api: Api) -> Iterator[Finding]:
    name = node_name(config)
    node: dict[str, Any] | None = None
    unread = ""
    try:
        node = read_node(api, name)
    except KubeApiError as error:
        if error.status not in (403, 404):
            yield failed("api server", str(error), _advise(error.status))
            yield from skip(
                ("node", *_ABOUT_NODE, *_ABOUT_API), "the API server does not answer us"
            )
            return
        unread = str(error)
    yield ok("api server", f"{api.server.url} answers")
    if node is None:
        advice = (
            f"Is {name} what Kubernetes calls this node? Else set node_name, in the agent's pod by "
            "--node-name=$NODE_NAME."
        )
        yield failed("node", unread, advice)
        yield from skip(_ABOUT_NODE, "the node cannot be read")
    else:
        yield from _check_node(config, name, node)
    yield _ask("crd", lambda: _check_crd(api))
    if config.koordinator_device == "yes":
        yield _ask("koordinator crd", lambda: _check_koordinator_crd(api))
    yield _ask("access", lambda: _check_access(config, api))
    yield _ask("report", lambda: _check_report(api, name))


def _ask(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except KubeApiError as error:
        return failed(name, str(error), _advise(error.status))


def _advise(status: int | None) -> str:
    if status is None:
        return "See kube_api and service_account_dir, network policies and the API server's log."
    if status == 401:
        return (
            "The token has ended or is another cluster's. In the agent's pod Kubernetes renews it; "
            "see service_account_dir."
        )
    if status == 403:
        return "The agent's account may not do this: see the finding access."
    return "See the API server's log. The agent tries again until it answers."


# --- the node -------------------------------------------------------------------------------------


def _check_node(config: Config, name: str, node: dict[str, Any]) -> Iterator[Finding]:
    status = _object(node, "status")
    info = _object(status, "nodeInfo")
    yield ok("node", f"{name}, kubelet {info.get('kubeletVersion') or 'of unknown version'}")
    yield checkup_api.judge_runtime(str(info.get("containerRuntimeVersion") or ""))
    labels = _object(_object(node, "metadata"), "labels")
    yield checkup_api.judge_label(check_label(labels), SCHEDULE_LABEL, name)
    yield checkup_api.judge_taint(node, config.startup_taint)
    yield checkup_api.judge_rivals(_object(status, "allocatable"))


def _object(parent: dict[str, Any], key: str) -> dict[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}


# --- what is served, and granted ------------------------------------------------------------------


def _check_crd(api: Api) -> Finding:
    return checkup_api.judge_crd(_versions(api, GROUP), served(api, GROUP, VERSION))


def _check_koordinator_crd(api: Api) -> Finding:
    return checkup_api.judge_koordinator_crd(served(api, DEVICE_GROUP, DEVICE_VERSION))


def _versions(api: Api, group: str) -> list[str]:
    """Those of the group that are served, none where there is no such group."""
    try:
        versions = api.get(f"/apis/{group}").get("versions")
    except KubeApiError as error:
        if error.status == 404:
            return []
        raise
    entries = versions if isinstance(versions, list) else []
    return [str(entry.get("version")) for entry in entries if isinstance(entry, dict)]


def _check_access(config: Config, api: Api) -> Finding:
    asked = needed(_duties(config))
    return checkup_api.judge_access(asked, [one for one in asked if not _may(api, one)])


def _may(api: Api, access: Access) -> bool:
    return may(
        *(api, access.verb, access.group, access.resource),
        namespace=access.namespace,
        subresource=access.subresource,
    )


def _duties(config: Config) -> set[Duty]:
    through_cgroups = bool(config.kubelet_url) and not os.path.exists(config.nri_socket)
    duties = {
        Duty.REPORT: True,
        Duty.ACK: config.ack_objects == "yes",
        Duty.KOORDINATOR: config.koordinator_device == "yes",
        Duty.TAINT: bool(config.startup_taint),
        Duty.CGROUP: through_cgroups,
    }
    return {duty for duty, is_due in duties.items() if is_due}


def _check_report(api: Api, name: str) -> Finding:
    try:
        current = read_topology(api, name)
    except KubeApiError as error:
        if error.status == 404:
            return skipped("report", "its kind is not there: see crd")
        raise
    return checkup_api.judge_report(current, current is not None and is_foreign(current))
