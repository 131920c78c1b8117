"""What every group below kubepods should have for CPUs, and in which order that is written.

Who is not pinned runs on the shared pool. On cgroup v2 the pool is set where the kernel hands it
down: on the groups of the two classes and of unpinned Guaranteed pods. A class in which a pod
holds CPUs, or waits for some, keeps them, and its other pods are narrowed one by one. On cgroup v1
nothing is handed down, so that every group is written.

Source: the kernel's Documentation/admin-guide/cgroup-v1/cpusets.rst and cgroup-v2.rst. On v1 a
group never has a CPU that the group above it lacks; writing otherwise is refused. On v2 a group has
in force what it shares with the group above it, and all of that where they share nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.bitmap import Bitmap
from agent.core.topology import EMPTY, union


class Qos(StrEnum):
    """Kubernetes' classes of pods. Those of Guaranteed pods have no group of their own."""

    GUARANTEED = "guaranteed"
    BURSTABLE = "burstable"
    BESTEFFORT = "besteffort"


# --- what there is --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group. `path` begins below the mount of its hierarchy, without a slash. `cpus` is what is
    written in it: on v2 empty where it has what the group above it has."""

    path: str
    cpus: Bitmap


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerGroup(Group):
    """The group of a container or of a pod's sandbox. `runtime` is what its name begins with
    (`cri-containerd`), empty where the name is the id alone."""

    id: str
    runtime: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup(Group):
    """The group of a pod."""

    uid: str
    qos: Qos
    containers: tuple[ContainerGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups(Group):
    """Kubepods and all below, as it was read; `version` is 1 or 2.

    `cpus` are those that kubepods has in force. `unread` are sentences on groups that could not be
    read, and are left out.
    """

    version: int
    classes: Mapping[Qos, Group] = field(default_factory=dict)
    pods: tuple[PodGroup, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPod:
    """What is known of a pod beside its groups.

    `containers` are the ids of its containers, without the sandbox; `pinned` are the CPUs of those
    that are pinned, by id. `held` is what the ledger says that the pod holds, also for containers
    that do not exist at the moment. `waits`: it asked for CPUs that it does not hold yet. `near`
    are CPUs that unpinned containers are wanted on, as far as they are in the pool.
    """

    uid: str
    qos: Qos
    containers: frozenset[str] = frozenset()
    pinned: Mapping[str, Bitmap] = field(default_factory=dict)
    held: Bitmap = EMPTY
    waits: bool = False
    near: Mapping[str, Bitmap] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One write of cpuset.cpus."""

    path: str
    cpus: Bitmap


@dataclass(slots=True, kw_only=True, eq=False)
class _Aim:
    """A group on its way: `own` is what is written in it, `now` what it had in force before,
    `want` what it shall have in force. `exact`: it is set even where it would inherit the same."""

    path: str
    parent: "_Aim | None"
    own: Bitmap
    now: Bitmap
    want: Bitmap
    exact: bool = False
    children: list["_Aim"] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """What all groups are judged by."""

    version: int
    usable: Bitmap
    pool: Bitmap
    pods: Mapping[str, GroupPod]
    write_pins: bool


def plan_writes(
    groups: Groups,
    pods: Iterable[GroupPod],
    pool: Bitmap,
    online: Bitmap,
    *,
    write_pins: bool = True,
) -> tuple[Write, ...]:
    """The writes after which everybody runs where they should, in an order that is safe; none where
    all is well. `groups` must have been read before `pods` were taken down, or else a container
    that was pinned in between looks unpinned.

    On the way no write is refused, and no pinned container loses a CPU of its own. No set is empty
    or has CPUs that are offline; where the pool has no other CPUs left it is all of them. A group
    that nobody knows is left alone as long as no container is in it. Without `write_pins` the
    groups of pinned containers are somebody else's to write.
    """
    usable = groups.cpus & online
    if not usable:
        return ()
    known = {pod.uid: pod for pod in pods}
    scene = _Scene(
        version=groups.version,
        usable=usable,
        pool=pool & usable or usable,
        pods=known,
        write_pins=write_pins,
    )
    wrong = [aim for aim in _aims(scene, groups) if not _is_reached(scene, aim)]
    return tuple(_order(scene, wrong))


def find_drift(groups: Groups, pods: Iterable[GroupPod], online: Bitmap) -> dict[str, Bitmap]:
    """What the pinned containers have in force that do not have just their CPUs, by their ids."""
    usable = groups.cpus & online
    pinned = {id_: cpus & usable for pod in pods for id_, cpus in pod.pinned.items()}
    drift = {}
    for pod in groups.pods:
        above = groups.classes.get(pod.qos)
        now = _in_force(groups.version, above.cpus, usable) if above else usable
        now = _in_force(groups.version, pod.cpus, now)
        for container in pod.containers:
            has = _in_force(groups.version, container.cpus, now)
            if has != pinned.get(container.id, has):
                drift[container.id] = has
    return drift


def _in_force(version: int, own: Bitmap, above: Bitmap) -> Bitmap:
    return own if version == 1 else own & above or above


# --- what there should be -------------------------------------------------------------------------


def _aims(scene: _Scene, groups: Groups) -> list[_Aim]:
    """All groups below kubepods, classes first, then pods, then containers."""
    top = _Aim(path=groups.path, parent=None, own=groups.cpus, now=scene.usable, want=scene.usable)
    classes = {
        qos: _aim(scene, top, group, _of_class(scene, groups, qos))
        for qos, group in groups.classes.items()
    }
    pods = []
    containers = []
    for group in groups.pods:
        above = classes.get(group.qos, top)
        want = _of_pod(scene, group, above.want)
        aim = _aim(scene, above, group, want)
        pods.append(aim)
        containers += [_container(scene, aim, group.uid, each) for each in group.containers]
    foreign = () if scene.write_pins else _pinned(scene)
    ids = [container.id for group in groups.pods for container in group.containers]
    mine = [aim for id_, aim in zip(ids, containers, strict=True) if id_ not in foreign]
    return [*classes.values(), *pods, *mine]


def _pinned(scene: _Scene) -> frozenset[str]:
    return frozenset(id_ for pod in scene.pods.values() for id_ in pod.pinned)


def _aim(scene: _Scene, parent: _Aim, group: Group, want: Bitmap, exact: bool = False) -> _Aim:
    now = _in_force(scene.version, group.cpus, parent.now)
    aim = _Aim(path=group.path, parent=parent, own=group.cpus, now=now, want=want, exact=exact)
    parent.children.append(aim)
    return aim


def _of_class(scene: _Scene, groups: Groups, qos: Qos) -> Bitmap:
    """The pool and what its pods hold; all while one waits, for nobody knows what it will get."""
    there = {group.uid: group for group in groups.pods}
    want = scene.pool
    for uid, pod in scene.pods.items():
        group = there.get(uid)
        if (group.qos if group else pod.qos) is qos:
            want |= scene.usable if pod.waits else _held(scene, pod, group)
    return want


def _held(scene: _Scene, pod: GroupPod, group: PodGroup | None) -> Bitmap:
    """What the pod holds; on v1 also what its containers have that somebody else is to narrow."""
    held = pod.held | union(pod.pinned.values())
    if group and scene.version == 1 and not scene.write_pins:
        held |= union(each.cpus for each in group.containers if each.id in pod.pinned)
    return held & scene.usable


def _of_pod(scene: _Scene, group: PodGroup, above: Bitmap) -> Bitmap:
    pod = scene.pods.get(group.uid)
    if pod is None:
        return scene.pool if group.containers else above
    if pod.waits:
        return above
    held = _held(scene, pod, group)
    return held | scene.pool if _shares(pod) or not held else held


def _shares(pod: GroupPod) -> bool:
    """Whether one of its containers runs in the pool."""
    return bool(pod.containers - pod.pinned.keys())


def _container(scene: _Scene, above: _Aim, uid: str, group: ContainerGroup) -> _Aim:
    pod = scene.pods.get(uid)
    if pod and group.id in pod.pinned:
        pin = pod.pinned[group.id] & scene.usable
        if pin:
            return _aim(scene, above, group, pin, exact=True)
    near = pod.near.get(group.id, EMPTY) if pod else EMPTY
    want = near & scene.pool or scene.pool
    return _aim(scene, above, group, want if want <= above.want else above.want)


# --- the way there --------------------------------------------------------------------------------


def _is_reached(scene: _Scene, aim: _Aim) -> bool:
    """Whether the group has what it should have as soon as the groups above it have."""
    if scene.version == 1:
        return aim.own == aim.want
    if aim.exact:
        return aim.own & scene.usable == aim.want
    return _in_force(2, aim.own, _above(aim).want) == aim.want


def _inherits(scene: _Scene, aim: _Aim) -> bool:
    """Whether the group need not be narrower than the one above it: it is never written again."""
    return scene.version == 2 and not aim.exact and aim.want == _above(aim).want


def _order(scene: _Scene, wrong: Sequence[_Aim]) -> list[Write]:
    """First groups get what they will have beside what they have, on v1 from the top down; then,
    from the bottom up, what they should have. `wrong` is from the top down.

    On v2 nothing is refused, but a group that has no set, or one that does not count as the group
    above has none of it, would follow when that is widened: it is written before.
    """
    writes: list[Write] = []
    free = [aim for aim in wrong if _inherits(scene, aim)]
    own = [aim for aim in wrong if not _inherits(scene, aim)]
    for aim in free:
        if not aim.own & _above(aim).now:
            _write(writes, aim, scene.usable)
    for aim in own if scene.version == 1 else reversed(own):
        if _must_widen(scene, aim):
            _write(writes, aim, (aim.now | aim.want) & scene.usable)
    for aim in reversed(own):
        _write(writes, aim, aim.want)
    for aim in free:
        _write(writes, aim, scene.usable)
    return writes


def _must_widen(scene: _Scene, aim: _Aim) -> bool:
    """On v1 whether somebody below needs it; on v2 whether it would follow the group above it."""
    if scene.version == 1:
        return bool(aim.children) and not aim.want <= aim.own
    above = _above(aim)
    return not above.want <= above.now


def _write(writes: list[Write], aim: _Aim, cpus: Bitmap) -> None:
    if cpus != aim.own:
        aim.own = cpus
        writes.append(Write(path=aim.path, cpus=cpus))


def _above(aim: _Aim) -> _Aim:
    assert aim.parent is not None
    return aim.parent
