"""The command `kubectl inspect-numalet`: the GPUs and CPUs of a cluster, NUMA node by NUMA node.

Exit code: 0 done, 2 with one sentence where the cluster cannot be asked, or has no such node.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from agent.core.inspection import KubeNode, NodeView, inspect_cluster, see_node
from agent.core.inspection_text import draw_cluster, draw_details, inspection_to_json
from agent.core.strict_json import Object, printable
from agent.edge.kubecluster import Cluster, connect, list_nodes, list_topologies
from agent.errors import AgentError, ConfigError, KubeApiError

_ALL = ("",)
"""Instead of names: no name is asked for in particular."""
_FEW = 20
"""Reports that are asked for one by one. All of a large cluster are a hundred megabytes."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        code = _inspect(options)
        sys.stdout.flush()
        return code
    except AgentError as error:
        _complain(str(error))
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kubectl inspect-numalet",
        description="Shows which GPUs and CPUs of a cluster are taken and which are free, by NUMA "
        "node, as the nodes' topology reports tell. It changes nothing.",
        epilog="GPUS are allocated/total. NUMA GPUS, FREE CPUS and STATE list the NUMA nodes 0, 1, "
        "…, or name them. STATE: idle, single (pods of this NUMA node only), shared (a pod that "
        "spans NUMA nodes).",
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="NODE", help="only these nodes (all)")
    parser.add_argument(
        *("-d", "--details"), action="store_true", help="also which pods hold what, node by node"
    )
    parser.add_argument(
        *("-o", "--output"), choices=("wide", "json"), help="a wider table, or everything as JSON"
    )
    parser.add_argument(
        *("-l", "--selector"), metavar="SELECTOR", default="", help="only nodes with these labels"
    )
    parser.add_argument(
        "--kubeconfig", metavar="FILE", default="", help="($KUBECONFIG, or ~/.kube/config)"
    )
    parser.add_argument(
        "--context", metavar="NAME", default="", help="of the kubeconfig (its current one)"
    )
    return parser


def _inspect(options: argparse.Namespace) -> int:
    if options.names and options.selector:
        raise ConfigError("give names of nodes or a selector, not both")
    cluster = connect(options.kubeconfig, options.context)
    names = tuple(dict.fromkeys(map(_node_name, options.names)))
    nodes = _nodes(cluster, options.selector, names)
    reports = _reports(cluster, _asked_for(names, options.selector, nodes))
    views = inspect_cluster(reports, nodes, only_these=bool(options.selector), each=bool(names))
    _print(views, options, whole=not names and not options.selector)
    missing = set(names) - {view.name for view in views}
    for name in sorted(missing):
        _complain(f'{cluster.server}: there is no node "{printable(name, 253)}"')
    return 2 if missing else 0


def _node_name(text: str) -> str:
    """Also of `node/gpu-1`, as `kubectl get nodes -o name` prints it."""
    name = text.removeprefix("node/")
    if not _NAME.fullmatch(name):
        raise ConfigError(f'"{printable(text, 253)}" cannot be the name of a node')
    return name


def _nodes(cluster: Cluster, selector: str, names: Sequence[str]) -> dict[str, KubeNode] | None:
    """By name; None where we may not list them and can do without."""
    found: Iterable[Object] = chain.from_iterable(
        list_nodes(cluster, selector, name) for name in names or _ALL
    )
    try:
        return {node.name: node for node in map(see_node, found) if node}
    except KubeApiError as error:
        if error.status != 403 or selector:
            raise
        _complain(f"{error}; nodes without a report are not shown")
        return None


def _asked_for(
    names: Sequence[str], selector: str, nodes: Mapping[str, KubeNode] | None
) -> Sequence[str]:
    """The nodes whose reports are asked for one by one; or all, in pages."""
    few = tuple(nodes) if selector and nodes is not None and len(nodes) <= _FEW else _ALL
    return names or few


def _reports(cluster: Cluster, names: Iterable[str]) -> Iterator[Object]:
    for name in names:
        yield from list_topologies(cluster, name)


def _print(views: Sequence[NodeView], options: argparse.Namespace, whole: bool) -> None:
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if options.output == "json":
        print(json.dumps(inspection_to_json(views), indent=1, ensure_ascii=False))
    elif not views:
        _complain("no node has a topology report or GPUs to report")
    elif options.details:
        sys.stdout.write(draw_details(views, colour=colour, whole=whole))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        wide = options.output == "wide"
        sys.stdout.write(draw_cluster(views, wide=wide, colour=colour, width=width, whole=whole))


def _complain(sentence: str) -> None:
    print(f"kubectl inspect-numalet: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
