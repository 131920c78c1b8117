"""What happens in the demo, step by step: each is played, shown and checked."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.core.bitmap import Bitmap
from agent.core.picture import count_of, format_bytes
from agent.core.report import STATE_ATTRIBUTE
from agent.core.request import Demand, read_demand
from agent.core.strict_json import Object
from agent.core.svg import Owner
from agent.core.topology import Machine
from agent.demo import play, promises
from agent.demo.node import Node
from agent.demo.picture import Holder, align, draw_nodes, letter
from agent.demo.play import Played, Stage
from agent.demo.pods import Pod, parse_pod
from agent.demo.promises import Promise, held_gpus, nodes_of, pinned_cpus
from agent.demo.running import keep_off, while_running
from agent.demo.screen import DIM, Screen

CREATED: Final = "2026-01-01T00:00:00Z"
_PATIENCE_S: Final = 15.0
"""For what is promised soon."""
_LESS_PATIENCE_S: Final = 2.0
"""Once something is broken, the rest may be, too."""
_MOST_ROWS: Final = 16
_LATE: Final[Object] = {
    "metadata": {"namespace": "kube-system", "name": "late"},
    "spec": {
        "containers": [{"name": "main", "resources": {"limits": {"cpu": "10m", "memory": "8Mi"}}}]
    },
}
"""A pod whose cgroup is in no class that is narrowed already."""
_BACKGROUND: Final[tuple[Object, ...]] = (
    {
        "metadata": {"namespace": "kube-system", "name": "log-agent"},
        "spec": {"containers": [{"name": "main"}]},
    },
    {
        "metadata": {"namespace": "kube-system", "name": "kube-proxy"},
        "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "100m"}}}]},
    },
)
"""Pods as every node has some; they ask for nothing of ours."""

Expect = Callable[[Node, Sequence[Played]], Iterable[Promise]]
"""What else is promised of pods, where it is known what they should get."""


@dataclass(slots=True, kw_only=True)
class Story:
    """`kept` and `broken` count promises."""

    node: Node
    screen: Screen
    pods: Sequence[Pod]
    expect: Expect
    kept: int = 0
    broken: int = 0
    others: list[Played] = field(default_factory=list)
    played: list[Played] = field(default_factory=list)

    def tell(self) -> None:
        """All of it. Raises FailedError where it cannot go on."""
        for manifest in _BACKGROUND:
            self._start_other(manifest)
        self._discover()
        self._apply()
        self._report()
        self._restart()
        self._end()

    def _start_other(self, manifest: Object) -> None:
        pod = parse_pod(manifest, self.node.name, CREATED)
        self.others.append(play.start(self.node, pod, self.all))

    @property
    def all(self) -> list[Played]:
        return [*self.others, *self.played]

    @property
    def owners(self) -> tuple[Owner, ...]:
        """Who holds what, for the SVG."""
        return tuple(
            Owner(name=one.pod.name, gpus=_indices(self.node.machine, one), cpus=pinned_cpus(one))
            for one in self.played
            if one.held or pinned_cpus(one)
        )

    # --- the steps --------------------------------------------------------------------------------

    def _discover(self) -> None:
        node = self.node
        with self.screen.step(
            "1  The agent starts: what it discovers, and what it offers to kubelet"
        ):
            node.start_agent()
            node.wait(lambda: node.is_asked, "the container runtime asks the agent")
            pledged = list(promises.after_start(node))
            self._wait(pledged)
        self.screen.lines(_describe(node.machine), 5)
        self._check(pledged)

    def _apply(self) -> None:
        node = self.node
        names = ", ".join(one.name.removeprefix("default/") for one in self.pods[:4])
        more = f" and {len(self.pods) - 4} more" if len(self.pods) > 4 else ""
        with self.screen.step(f"2  Pods come, and get their places: {names}{more}"):
            for pod in self.pods:
                self.played.append(play.start(node, pod, self.all))
                node.check_agent()
                self.screen.tick()
            pledged = [
                *while_running(node, self.all),
                *self.expect(node, self.played),
            ]
            self._wait(pledged)
        self._show_pods()
        self._check(pledged)

    def _report(self) -> None:
        with self.screen.step("3  The cluster is told: NodeResourceTopology, node labels, Events"):
            pledged = list(promises.while_reported(self.node, self.all))
            self._wait(pledged)
        self.screen.lines(_describe_report(self.node), 5)
        self._check(pledged)

    def _restart(self) -> None:
        node = self.node
        with self.screen.step("4  The agent is killed (SIGKILL) and started anew"):
            before = promises.see_all(node, self.all)
            node.kill_agent()
            node.wait(lambda: not node.runtime.plugins, "the container runtime notices")
            node.start_agent()
            node.wait(lambda: node.is_asked, "the container runtime asks the agent again")
            pledged = list(promises.after_restart(node, self.all, before))
            self._start_other(_LATE)
            if any(pinned_cpus(one) for one in self.played):
                pledged.append(keep_off(node, self.all, "who starts now is kept off them, too"))
            self._wait(pledged)
        self._check(pledged)

    def _end(self) -> None:
        with self.screen.step("5  The pods end"):
            for one in self.played:
                play.end(self.node, one)
            pledged = list(promises.after_end(self.node, self.others))
            self._wait(pledged)
        self._check(pledged)

    # --- promises ---------------------------------------------------------------------------------

    def _wait(self, pledged: Sequence[Promise]) -> None:
        """Until all is as promised, or for as long as is patient."""
        patience_s = _LESS_PATIENCE_S if self.broken else _PATIENCE_S
        self.node.comes_true(lambda: not any(one.find_wrong() for one in pledged), patience_s)

    def _check(self, pledged: Sequence[Promise]) -> None:
        for one in pledged:
            if why := one.find_wrong():
                self.broken += 1
                self.screen.broken(one.text, why)
            else:
                self.kept += 1
                self.screen.kept(one.text)
        if pledged:
            self.screen.line()

    # --- pictures ---------------------------------------------------------------------------------

    def _show_pods(self) -> None:
        machine = self.node.machine
        rows: list[tuple[str, ...]] = [("", "POD", "POLICY", "NUMA", "GPUS", "CPUS", "MEMORY")]
        shown = self.played[:_MOST_ROWS]
        rows += [self._row(number, one) for number, one in enumerate(shown)]
        self.screen.lines(align(rows), 5)
        if more := len(self.played) - len(shown):
            self.screen.lines([f"and {count_of(more, 'more pod')}"], 5)
        self.screen.line()
        holders = [
            Holder(number=number, gpus=_indices(machine, one), cpus=pinned_cpus(one))
            for number, one in enumerate(self.played)
        ]
        for cells in draw_nodes(machine, holders):
            text = "".join(self.screen.paint(text, code) for text, code in cells)
            self.screen.lines([text], 5)
        legend = "GPUs in brackets; a column is a core, a row its threads; · is free for everybody"
        self.screen.lines([self.screen.paint(legend, DIM), ""], 5)

    def _row(self, number: int, played: Played) -> tuple[str, ...]:
        asked = read_demand(played.pod.body)
        policy = str(asked.policy or "-") if isinstance(asked, Demand) else "-"
        name = played.pod.name.removeprefix("default/")
        if played.stage is not Stage.RUNNING:
            mark = letter(number) if played.held else "–"
            return mark, name, policy, f"{played.stage}: {played.reason}"
        machine, cpus = self.node.machine, pinned_cpus(played)
        gpus = held_gpus(machine, played)
        nodes = nodes_of(machine, cpus) | Bitmap(g.node for g in gpus if g.node is not None)
        mems = {one.created.linux.resources.cpu.mems for one in played.placed} - {""}
        shared = str(self.node.kubepods.cpus_of(played.placed[0].cgroup))
        return (
            letter(number),
            name,
            policy,
            str(nodes) or "-",
            str(_indices(machine, played)) or "-",
            str(cpus) or f"shared: {shared}",
            f"node {','.join(sorted(mems))}" if mems else "any node",
        )


def _indices(machine: Machine, played: Played) -> Bitmap:
    return Bitmap(gpu.index for gpu in held_gpus(machine, played))


def _describe(machine: Machine) -> list[str]:
    """A row for each NUMA node, and the links between GPUs."""
    rows = []
    for node in machine.nodes:
        gpus = [gpu for gpu in machine.gpus if gpu.node == node.id]
        models = ", ".join(sorted({gpu.model for gpu in gpus}))
        cpus = f"CPUs {node.cpus}" if node.cpus else str(node.kind)
        cards = f"GPUs {Bitmap(gpu.index for gpu in gpus)}   {models}" if gpus else ""
        rows.append((f"node {node.id}", format_bytes(node.memory_bytes), cpus, cards))
    links = Counter(str(link) for row in machine.links for link in row if link)
    words = [f"{word} ({count_of(count // 2, 'pair')})" for word, count in links.most_common()]
    return [*align(rows), *([f"links    {', '.join(words)}"] if words else [])]


def _describe_report(node: Node) -> list[str]:
    """Zones, labels, Events, as the API server has them."""
    zones: list[tuple[str, ...]] = [("ZONE", "STATE", "GPUS FREE", "CPUS FREE", "MEMORY FREE")]
    zones += [_zone_row(zone) for zone in (node.report or {}).get("zones", ())]
    found = node.api.get("nodes", node.name) or {}
    labels = [
        f"{key}={value}"
        for key, value in sorted(found["metadata"].get("labels", {}).items())
        if key.startswith("aliyun.accelerator/")
    ]
    found_events = node.events
    events = [
        (one["reason"], one["involvedObject"]["name"], one["message"])
        for one in found_events[:_MOST_ROWS]
    ]
    if more := len(found_events) - len(events):
        events.append(("and", f"{more} more", ""))
    parts = [align(zones), labels, align([("EVENT", "POD", "MESSAGE"), *events]) if events else []]
    return [line for part in parts if part for line in (*part, "")]


def _zone_row(zone: Object) -> tuple[str, ...]:
    has = {one["name"]: one for one in zone["resources"]}
    states = [one["value"] for one in zone.get("attributes", ()) if one["name"] == STATE_ATTRIBUTE]

    def free(name: str, show: Callable[[int], str] = str) -> str:
        one = has.get(name)
        if one is None or one["capacity"] == "0":
            return "-"
        return f"{show(int(one['available']))} of {show(int(one['capacity']))}"

    cells = free("aliyun.com/gpu"), free("cpu"), free("memory", format_bytes)
    return zone["name"], *(states or ["-"]), *cells
