"""Random machines for properties, and the described ones without files or driver."""

from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.topology import (
    Core,
    Gpu,
    Link,
    LinkKind,
    Machine,
    NodeKind,
    NodeSource,
    NumaNode,
    parse_link,
)
from agent.fakes import node
from tests import machines


@st.composite
def random_machines(draw: st.DrawFn, most_nodes: int = 4, most_gpus: int = 6) -> Machine:
    """Machines of up to `most_nodes` nodes with sparse ids, uneven cores and random links."""
    count = draw(st.integers(1, most_nodes))
    ids = sorted(draw(st.sets(st.integers(0, 60), min_size=count, max_size=count)))
    threads = draw(st.integers(1, 2))
    cores: list[Core] = []
    cpus_of: dict[int, Bitmap] = {id_: Bitmap() for id_ in ids}
    with_cpus = sorted(draw(st.sets(st.sampled_from(ids), min_size=1)))
    next_cpu = draw(st.integers(0, 3))
    for id_ in with_cpus:
        for _ in range(draw(st.integers(1, 4))):
            cpus = Bitmap(range(next_cpu, next_cpu + draw(st.integers(1, threads))))
            next_cpu = max(cpus) + 1
            cpus_of[id_] |= cpus
            core = len(cores)
            l3 = draw(st.none() | st.integers(0, 3))
            die = draw(st.none() | st.integers(0, 1))
            cores.append(Core(id=core, socket=id_ // 2, die=die, node=id_, l3=l3, cpus=cpus))
    nodes = tuple(_node(draw, id_, cpus_of[id_], count) for id_ in ids)
    gpus = tuple(_gpu(draw, i, with_cpus) for i in range(draw(st.integers(0, most_gpus))))
    return Machine(
        name=draw(st.text(max_size=8)),
        nodes=nodes,
        cores=tuple(cores),
        gpus=gpus,
        links=_links(draw, len(gpus)),
        offline_cpus=Bitmap([next_cpu + 1]) if draw(st.booleans()) else Bitmap(),
        isolated_cpus=Bitmap([next_cpu - 1]) if draw(st.booleans()) else Bitmap(),
        warnings=tuple(draw(st.lists(st.text(max_size=8), max_size=2))),
    )


def _node(draw: st.DrawFn, id_: int, cpus: Bitmap, nodes: int) -> NumaNode:
    bare = st.sampled_from([NodeKind.MEMORY_ONLY, NodeKind.DEVICE_ONLY])
    row = st.tuples(*[st.sampled_from([10, 12, 20, 32])] * nodes)
    return NumaNode(
        id=id_,
        kind=NodeKind.CPU if cpus else draw(bare),
        cpus=cpus,
        memory_bytes=draw(st.integers(0, 1 << 40)),
        distances=draw(st.just(()) | row),
        hugepages=draw(st.sampled_from([(), ((2 << 20, 7),), ((2 << 20, 7), (1 << 30, 1))])),
    )


def _gpu(draw: st.DrawFn, index: int, nodes: list[int]) -> Gpu:
    node = draw(st.none() | st.sampled_from(nodes))
    return Gpu(
        index=index,
        minor=draw(st.sampled_from([None, 40 + index])),
        uuid=draw(st.sampled_from([None, f"GPU-{index}"])),
        bdf=f"{0x10000 * draw(st.integers(0, 1)):04x}:{index:02x}:00.0",
        model=draw(st.text(max_size=8)),
        memory_bytes=draw(st.none() | st.integers(0, 1 << 40)),
        node=node,
        node_source=NodeSource.UNKNOWN if node is None else NodeSource.NVML_MEMORY,
        fault=draw(st.sampled_from([None, None, "lost"])),
    )


def _links(draw: st.DrawFn, gpus: int) -> tuple[tuple[Link | None, ...], ...]:
    kinds = [Link(kind=kind) for kind in LinkKind if kind is not LinkKind.NV]
    some = st.sampled_from([*kinds, *(Link(kind=LinkKind.NV, nvlinks=n) for n in (1, 2, 8))])
    matrix: list[list[Link | None]] = [[None] * gpus for _ in range(gpus)]
    for i in range(gpus):
        for j in range(i):
            matrix[i][j] = matrix[j][i] = draw(some)
    return tuple(map(tuple, matrix))


def described(name: str) -> Machine:
    """The machine of tests/machines/<name>.toml as its files and its driver together show it."""
    facts = machines.load(name)
    link = {cell: parse_link(cell) for row in facts.links for cell in row if cell != "X"}
    cores = sorted((c, n) for n in facts.nodes for c in n.cores)
    caches = _caches([n.socket for _, n in cores], facts.cores_per_l3)
    return Machine(
        name=name,
        nodes=tuple(
            NumaNode(
                id=n.id,
                kind=_kind(n),
                cpus=Bitmap(n.cpus),
                memory_bytes=n.memory_gib << 30,
                distances=n.distances,
            )
            for n in facts.nodes
        ),
        cores=tuple(
            Core(
                id=i,
                socket=n.socket or 0,
                node=n.id,
                l3=caches[i],
                cpus=Bitmap(c),
            )
            for i, (c, n) in enumerate(cores)
        ),
        gpus=tuple(
            Gpu(
                index=i,
                minor=i,
                uuid=g.uuid,
                bdf=g.bdf,
                model=g.model,
                memory_bytes=g.memory_gib << 30,
                node=g.node,
                node_source=NodeSource.SYSFS,
            )
            for i, g in enumerate(facts.gpus)
        ),
        links=tuple(tuple(link.get(cell) for cell in row) for row in facts.links),
    )


def _caches(sockets: list[int | None], cores_per_l3: int | None) -> list[int]:
    """The cache of each core: `cores_per_l3` cores of a socket share one, or the whole socket."""
    seen = dict.fromkeys(sockets, 0)
    number: dict[tuple[int | None, int], int] = {}
    caches = []
    for socket in sockets:
        place = (socket, seen[socket] // cores_per_l3 if cores_per_l3 else 0)
        seen[socket] += 1
        caches.append(number.setdefault(place, len(number)))
    return caches


def _kind(n: node.NodeFact) -> NodeKind:
    if n.cores:
        return NodeKind.CPU
    return NodeKind.MEMORY_ONLY if n.memory_gib else NodeKind.DEVICE_ONLY
