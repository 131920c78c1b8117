"""`numalet demo`: the real agent on a node that is not there.

The node is embedded: stand-ins for kubelet, container runtime, API server and GPU driver, and files
in a temporary folder for sysfs and cgroups. The agent is a process of its own, and the same that
runs on real nodes. What it did is checked from the stand-ins' side.

    command.py   arguments in, exit code out
    story.py     what happens, step by step
    promises.py  what must be so, and whether it is; running.py for pods that run
    ack.py       ACK's two Deployments, and what must become of them
    play.py      scheduler, kubelet and runtime: the life of a pod
    node.py      the embedded node, and the agent in it
    host.py      a Machine as files, once it is showable (showable.py); cgroups.py kubelet's
    pods.py      what a pod is for kubelet
    picture.py   who has what, as text; screen.py how it is printed
"""

import argparse
import signal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        metavar="FILE",
        help="a machine saved by show --json instead of a node of 8 A800; - is standard input",
    )
    parser.add_argument(
        *("-f", "--filename"),
        metavar="FILE",
        nargs="+",
        action="extend",
        help="Kubernetes YAML or JSON with pods and workloads instead of ACK's two Deployments; "
        "- is standard input",
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="also draw the node, coloured by pod, into FILE"
    )


def run_demo(options: argparse.Namespace) -> int:
    """0: every promise was kept; 1: one was broken, or the agent failed.

    Raises ConfigError for what cannot be shown at all.
    """
    try:
        from agent.demo.command import run  # gRPC and the like, which other commands do without

        return run(options)
    except KeyboardInterrupt:  # before anything is started
        return 128 + signal.SIGINT
