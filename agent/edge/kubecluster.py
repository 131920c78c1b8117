"""A whole cluster as its administrator sees it: nodes and their topology reports, by a kubeconfig.

This is for people's commands. The agent itself, which cannot spare the memory that the kubernetes
package takes, speaks to the API server through `edge.kubeapi`. The package is imported on first
use, which takes a quarter of a second.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from agent.core.report import GROUP, PLURAL, VERSION
from agent.core.strict_json import Object, printable
from agent.errors import ConfigError, KubeApiError

_PAGE: Final = 250
"""Objects asked for at once. A report of a large node has some 30 KiB, a Node 20 KiB."""
_LARGEST_PAGE: Final = 64 << 20
"""Bytes."""
_OLDER_VERSION: Final = "v1alpha1"
"""What older definitions of the resource serve alone."""
_DEFAULT_PATH: Final = "~/.kube/config"
_IN_CLUSTER: Final = "KUBERNETES_SERVICE_HOST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """An API server, by its URL, and who we are to it: the kubernetes package's ApiClient."""

    server: str
    client: Any
    timeout_s: float


def connect(kubeconfig: str = "", context: str = "", timeout_s: float = 30.0) -> Cluster:
    """The cluster of a context of a kubeconfig, of the current one if none is named.

    `kubeconfig` is a path; without one it is $KUBECONFIG, which may list several that are merged,
    or else the file in the home directory. Where none of these exists, a pod's own service account
    serves. Nothing is asked of the server yet, but a plugin that gives credentials is run.

    Raises:
        ConfigError: there is no such file or context, or it cannot be used.
    """
    paths = kubeconfig or os.environ.get("KUBECONFIG") or _DEFAULT_PATH
    existing = [path for path in paths.split(os.pathsep) if os.path.exists(_expanded(path))]
    if kubeconfig and not existing:
        raise ConfigError(f"{printable(kubeconfig, 400)}: there is no such file")
    if not existing and (context or _IN_CLUSTER not in os.environ):
        raise ConfigError(
            f"{printable(paths, 400)}: there is no such kubeconfig; give --kubeconfig"
        )
    client = _load(paths, context) if existing else _load_in_cluster()
    client.user_agent = "kubectl-inspect_numalet"
    return Cluster(
        server=printable(client.configuration.host, 200), client=client, timeout_s=timeout_s
    )


def list_nodes(cluster: Cluster, selector: str = "", name: str = "") -> Iterator[Object]:
    """The Node objects with these labels, or the one of that name, page by page.

    Raises:
        KubeApiError: the server cannot be reached, refuses, or makes no sense.
    """
    from kubernetes.client import CoreV1Api

    call = CoreV1Api(cluster.client).list_node
    return _pages(cluster, "nodes", call, label_selector=selector, field_selector=_named(name))


def list_topologies(cluster: Cluster, name: str = "") -> Iterator[Object]:
    """The NodeResourceTopology objects, or the one of that name, page by page.

    Raises:
        KubeApiError: as from list_nodes, and where the resource is not defined.
    """
    try:
        yield from _topologies(cluster, VERSION, name)
    except KubeApiError as error:
        if error.status != 404:
            raise
        yield from _older_topologies(cluster, name)


def _older_topologies(cluster: Cluster, name: str) -> Iterator[Object]:
    try:
        yield from _topologies(cluster, _OLDER_VERSION, name)
    except KubeApiError as error:
        if error.status != 404:
            raise
        raise KubeApiError(
            f"{cluster.server}: it has no {PLURAL}.{GROUP}: that definition (CRD) is not installed",
            404,
        ) from error


def _topologies(cluster: Cluster, version: str, name: str) -> Iterator[Object]:
    from kubernetes.client import CustomObjectsApi

    return _pages(
        cluster,
        PLURAL,
        CustomObjectsApi(cluster.client).list_cluster_custom_object,
        group=GROUP,
        version=version,
        plural=PLURAL,
        field_selector=_named(name),
    )


def _named(name: str) -> str:
    return f"metadata.name={name}" if name else ""


# --- the kubeconfig -------------------------------------------------------------------------------


def _expanded(path: str) -> str:
    return os.path.expanduser(path) if path else ""


def _load(paths: str, context: str) -> Any:
    from kubernetes import config

    make: Any = config.new_client_from_config
    where = printable(paths, 400)
    with _logged() as complaints:
        try:
            client = make(
                config_file=paths, context=context or None, client_configuration=_configuration()
            )
        except Exception as error:  # of a file of any shape the package may raise any
            raise ConfigError(f"{where}: {_config_problem(error, context)}") from error
    if complaints:
        raise ConfigError(f"{where}: it gives no credentials: {printable(complaints[0], 300)}")
    if urlsplit(client.configuration.host).scheme not in ("http", "https"):
        host = printable(client.configuration.host, 100)
        raise ConfigError(f'{where}: the server "{host}" is no URL like https://10.0.0.1:6443')
    return client


def _load_in_cluster() -> Any:
    from kubernetes import client, config

    load: Any = config.load_incluster_config
    configuration = _configuration()
    try:
        load(client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        why = printable(str(error), 200)
        raise ConfigError(f"no kubeconfig, and no service account of a pod: {why}") from error
    return client.ApiClient(configuration=configuration)


def _configuration() -> Any:
    """Nothing is tried twice: a person waits, and sees what is wrong."""
    from kubernetes.client import Configuration

    configuration = Configuration()
    configuration.retries = False
    return configuration


def _config_problem(error: Exception, context: str) -> str:
    text = str(error)
    if context and f"name {context} in " in text and "contexts" in text:
        return f'there is no context "{printable(context, 100)}"'
    if "current-context" in text:
        return "it has no current context; give --context"
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror or error}"
    return f"it is no kubeconfig that can be used: {printable(' '.join(text.split()), 300)}"


@contextmanager
def _logged() -> Iterator[list[str]]:
    """The errors that are logged meanwhile, instead of printed: the package logs what goes wrong
    with a plugin for credentials, and goes on without any."""
    complaints: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            complaints.append(record.getMessage())

    handler, root = Note(logging.ERROR), logging.getLogger()
    root.addHandler(handler)
    try:
        yield complaints
    finally:
        root.removeHandler(handler)


# --- the calls ------------------------------------------------------------------------------------


def _pages(cluster: Cluster, what: str, call: Any, **query: str) -> Iterator[Object]:
    """The items of all pages. A list that expired between two pages begins anew, once: its items
    may come twice then."""
    query = {key: value for key, value in query.items() if value}
    following, restarts = "", 0
    while True:
        try:
            page = _ask(
                cluster, what, call, query | ({"_continue": following} if following else {})
            )
        except KubeApiError as error:
            if error.status != 410 or not following or restarts:
                raise
            following, restarts = "", 1
            continue
        yield from _items(page)
        before, following = following, _continuation(page)
        if not following:
            return
        if following == before:
            raise KubeApiError(f"{cluster.server}: the list of {what} does not end")


def _items(page: Object) -> list[Object]:
    items = page.get("items")
    return [item for item in items if type(item) is dict] if type(items) is list else []


def _continuation(page: Object) -> str:
    meta = page.get("metadata")
    following = meta.get("continue") if type(meta) is dict else None
    return following if type(following) is str else ""


def _ask(cluster: Cluster, what: str, call: Any, query: dict[str, str]) -> Object:
    """One page; here foreign errors end."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError, InsecureRequestWarning

    where = f"{cluster.server}: "
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InsecureRequestWarning)  # the kubeconfig asks for it
            answer = call(
                **query,
                limit=_PAGE,
                _preload_content=False,
                _request_timeout=(min(10.0, cluster.timeout_s), cluster.timeout_s),
            )
            return _parse(_read(answer))
    except ApiException as error:
        if not error.status:
            raise KubeApiError(f"{where}{_tls_problem(str(error.reason))}") from error
        raise KubeApiError(where + _refusal(what, error), error.status) from error
    except (HTTPError, OSError, ValueError, RecursionError) as error:
        raise KubeApiError(f"{where}{_problem(error, cluster.timeout_s)}") from error


def _read(answer: Any) -> bytes:
    """Raises ValueError where there is no end to it."""
    parts, size = [], 0
    for part in answer.stream(1 << 20):
        parts.append(part)
        size += len(part)
        if size > _LARGEST_PAGE:
            raise ValueError(f"its answer is larger than {_LARGEST_PAGE >> 20} MiB")
    return b"".join(parts)


def _parse(body: bytes) -> Object:
    """Raises ValueError with a sentence."""
    try:
        page = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError("its answer is not JSON; is this an API server?") from error
    if type(page) is not dict:
        raise ValueError("its answer is no list of objects; is this an API server?")
    return page


# --- what went wrong ------------------------------------------------------------------------------


def _refusal(what: str, error: Any) -> str:
    """In the server's own words, where it has some."""
    said = _message(error.body) or str(error.reason or "")
    asked = {
        401: f"it does not know who we are ({error.status}); log in anew, or give --context",
        403: f"we may not list {what} ({error.status})",
    }.get(error.status, f"it refuses to list {what} ({error.status})")
    return f"{asked}: {printable(said, 300)}" if said else asked


def _message(body: object) -> str:
    """Of a Status object, or what there is of text."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    try:
        status = json.loads(text[:_LARGEST_PAGE])
    except (ValueError, RecursionError):
        status = None
    message = status.get("message") if type(status) is dict else None
    return " ".join((message if type(message) is str else text[:300]).split())


def _tls_problem(reason: str) -> str:
    text = printable(" ".join(reason.split()[1:]) or reason, 300)
    return f"no secure connection to it: {text}"


def _problem(error: Exception, timeout_s: float) -> str:
    from urllib3 import exceptions

    if isinstance(error, exceptions.NameResolutionError):
        return "its name cannot be resolved"
    if isinstance(error, exceptions.ProxyError):
        return "the proxy cannot be reached"
    if isinstance(error, exceptions.NewConnectionError | OSError):
        cause = error.__cause__ or error
        if isinstance(cause, ConnectionRefusedError):
            return "it cannot be reached: nobody listens there"
        return (
            f"it cannot be reached: {printable(getattr(cause, 'strerror', '') or str(cause), 200)}"
        )
    if isinstance(error, exceptions.TimeoutError):
        return f"it does not answer within {timeout_s:g} s"
    if isinstance(error, exceptions.HTTPError) and not isinstance(error, ValueError):
        return f"the connection broke: {printable(' '.join(str(error).split()), 200)}"
    return printable(str(error), 300)
