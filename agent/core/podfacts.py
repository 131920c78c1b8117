"""What the container runtime and kubelet tell of pods, as the facts that settle works on.

The runtime shows a pod's annotations and its total of CPUs at once, and its containers one by one,
when they are created. What is not there of a pod, because it is still to come or is being started
anew, is held for it as one container more, REST: its containers find their CPUs beside each other
whenever they come. A pod whose specification is known needs none of that.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType

from agent.core.adoption import Pin, PodFact
from agent.core.decision import read_cpus_by_name
from agent.core.offer import GPUS_KEY, Holding, to_fact
from agent.core.podspecs import is_leaving, name_of, uid_of
from agent.core.request import GPU_RESOURCE, PIN_KEY, Demand, read_demand
from agent.core.runtime import CpuTime, RuntimeContainer, RuntimePod, Stage
from agent.core.strict_json import Object

REST = "numalet-rest"
"""The name under which that is held which no container of a pod has now."""

_SHARES_OF_A_CPU = 1024
_LEAST_SHARES, _MOST_SHARES = 2, 262_144
"""What kubelet rounds to, for no request and for 256 CPUs and more.

Source: kubelet, pkg/kubelet/cm/helpers_linux.go.
"""

Given = Mapping[str, tuple[str, ...]]
"""Keys of GPUs by container."""

Memory = dict[str, tuple[tuple[object, ...], PodFact | None]]
"""Sandbox id → what its fact follows from, and the fact."""

_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Amount:
    """What a container has, as Kubernetes would have asked for it: CPUs in thousandths."""

    request_milli: int = 0
    limit_milli: int = 0
    memory_bytes: int | None = None
    gpus: int = 0

    @property
    def cpus(self) -> int:
        """Whole CPUs with request = limit, else 0."""
        whole = self.request_milli == self.limit_milli and self.limit_milli % 1000 == 0
        return self.limit_milli // 1000 if whole else 0


def read_facts(
    pods: Sequence[RuntimePod],
    containers: Iterable[RuntimeContainer],
    holdings: Sequence[Holding] = (),
    specs: Mapping[str, object] = _NOTHING,
    keys: Mapping[str, str] = MappingProxyType({}),
    memory: Memory | None = None,
) -> tuple[PodFact, ...]:
    """A fact for each pod of the runtime, and for each holder of devices that it does not know.

    `containers` are in order of creation. `specs` are pods as Kubernetes has them, by uid, as far
    as they are known. `keys` are those of the GPUs by device id. With a `memory` from one call to
    the next, a fact is worked out anew only where what it follows from is new.
    """
    of_pod: dict[str, list[RuntimeContainer]] = {pod.id: [] for pod in pods}
    for container in containers:
        if container.pod_id in of_pod:
            of_pod[container.pod_id].append(container)
    pods = _one_each(pods, of_pod)
    elsewhere = _held_elsewhere(pods, of_pod)
    held = {holding.pod: holding for holding in holdings}
    before = {} if memory is None else dict(memory)
    now: Memory = {}
    for pod in pods:
        holding = held.get(pod.pod)
        foreign = elsewhere.get(pod.id, frozenset()) if holding else frozenset()
        spec = _own_spec(pod, specs)
        causes = (pod, *of_pod[pod.id], holding, spec, keys, foreign)
        known = before.get(pod.id)
        if known is None or known[0] != causes:
            given = _given(of_pod[pod.id], holding, keys, foreign)
            fact = _fact(pod, of_pod[pod.id], given, spec)
            known = causes, fact
        now[pod.id] = known
    if memory is not None:
        memory.clear()
        memory.update(now)
    known_pods, uids = {pod.pod for pod in pods}, {pod.uid for pod in pods}
    others = [holding for holding in holdings if holding.pod not in known_pods]
    taken = _written_on(of_pod) if others else frozenset()
    named = _by_name(spec for uid, spec in specs.items() if uid not in uids) if others else {}
    return (
        *(fact for _, fact in now.values() if fact is not None),
        *(
            fact
            for holding in others
            if (fact := _held_only(keys, holding, named.get(holding.pod), taken))
        ),
    )


def _own_spec(pod: RuntimePod, specs: Mapping[str, object]) -> Object | None:
    """The pod's specification, None if it is not known. One under its uid and another name is a
    stranger's: who creates a pod may give it the annotation of a static pod's likeness."""
    spec = specs.get(pod.uid)
    return spec if isinstance(spec, dict) and name_of(spec) == pod.pod else None


def _by_name(specs: Iterable[object]) -> dict[str, object]:
    """The pods by "namespace/name", without those that share theirs."""
    found: dict[str, list[object]] = {}
    for spec in specs:
        found.setdefault(name_of(spec), []).append(spec)
    return {name: pods[0] for name, pods in found.items() if len(pods) == 1}


def _written_on(of_pod: Mapping[str, Iterable[RuntimeContainer]]) -> frozenset[str]:
    """The GPUs that Allocate wrote on containers which have not stopped."""
    live = (
        one
        for containers in of_pod.values()
        for one in containers
        if one.stage is not Stage.STOPPED
    )
    return frozenset(
        gpu for one in live for gpu in one.annotations.get(GPUS_KEY, "").split(",") if gpu
    )


def _held_only(
    keys: Mapping[str, str], holding: Holding, spec: object, taken: frozenset[str]
) -> PodFact | None:
    """A pod that kubelet gave devices, and that has no sandbox: not yet, or not any more.

    What containers of other pods have been given since, its list does not know yet; None if nothing
    is left.
    """
    fact = to_fact(keys, holding, uid_of(spec))
    if any(not taken.isdisjoint(gpus) for gpus in fact.given.values()):
        given = {
            name: tuple(gpu for gpu in gpus if gpu not in taken)
            for name, gpus in fact.given.items()
        }
        return replace(fact, given=given) if any(given.values()) else None
    if spec is None or is_leaving(spec):
        return fact
    return replace(fact, demand=read_demand(spec))


def _one_each(
    pods: Sequence[RuntimePod], of_pod: Mapping[str, Sequence[RuntimeContainer]]
) -> list[RuntimePod]:
    """One sandbox of each pod: that in which containers live, else the last."""
    chosen: dict[str, RuntimePod] = {}
    for pod in pods:
        other = chosen.get(pod.uid)
        if other is None or _is_live(of_pod[pod.id]) or not _is_live(of_pod[other.id]):
            chosen[pod.uid] = pod
    return list(chosen.values())


def _is_live(containers: Iterable[RuntimeContainer]) -> bool:
    return any(container.stage is not Stage.STOPPED for container in containers)


def _held_elsewhere(
    pods: Iterable[RuntimePod], of_pod: Mapping[str, Sequence[RuntimeContainer]]
) -> dict[str, frozenset[str]]:
    """Sandbox id → the GPUs of containers that live in other pods of the same name: kubelet lists
    the GPUs of both under it."""
    namesakes: dict[str, list[RuntimePod]] = {}
    for pod in pods:
        namesakes.setdefault(pod.pod, []).append(pod)
    return {
        pod.id: frozenset(
            gpu
            for other in group
            if other is not pod
            for one in of_pod[other.id]
            if one.stage is not Stage.STOPPED
            for gpu in one.annotations.get(GPUS_KEY, "").split(",")
        )
        for group in namesakes.values()
        if len(group) > 1
        for pod in group
    }


def _fact(
    pod: RuntimePod, containers: Sequence[RuntimeContainer], given: Given, spec: Object | None
) -> PodFact | None:
    """None for a pod of which nothing is there, and nothing is to come."""
    live = {one.name: one for one in containers if one.stage is not Stage.STOPPED}
    if spec is None:
        stopped = {one.name: one for one in containers if one.name not in live}
        given, amounts = _amounts(pod, live, stopped.values(), given)
        if not amounts:
            return None
        spec = _as_spec(pod, amounts)
    demand = read_demand(_as_started(spec, pod))
    if isinstance(demand, Demand):
        ours = bool(demand.pinned or demand.decided_cpus)
    else:  # it may run all the same: a specification can change, or be known later than the pod
        ours = pod.annotations.get(PIN_KEY) == "required"
    pinned = {
        name: Pin(cpus=container.cpus, mems=container.mems)
        for name, container in live.items()
        if container.cpus and ours
    }
    return PodFact(demand=demand, given=given, pinned=pinned)


def _as_started(spec: Object, pod: RuntimePod) -> Object:
    """The specification with the annotations that the pod was started with: what is written there
    later is not for it."""
    return {**spec, "metadata": {**spec["metadata"], "annotations": dict(pod.annotations)}}


def _given(
    containers: Iterable[RuntimeContainer],
    holding: Holding | None,
    keys: Mapping[str, str],
    foreign: frozenset[str],
) -> Given:
    """The GPUs that Allocate wrote on containers; of the others, those that kubelet lists, without
    the `foreign` ones."""
    devices = holding.devices if holding else {}
    listed = {name: tuple(keys.get(one, one) for one in ids) for name, ids in devices.items()}
    given = {name: tuple(one for one in ids if one not in foreign) for name, ids in listed.items()}
    for container in containers:
        written = tuple(dict.fromkeys(container.annotations.get(GPUS_KEY, "").split(",")))
        if ids := tuple(gpu for gpu in written if gpu and gpu not in foreign):
            given[container.name] = ids
    return {name: ids for name, ids in given.items() if ids}


# --- a pod whose specification is not known -------------------------------------------------------


def _amounts(
    pod: RuntimePod,
    live: Mapping[str, RuntimeContainer],
    stopped: Iterable[RuntimeContainer],
    given: Given,
) -> tuple[Given, dict[str, _Amount]]:
    """What each container that is there has, and REST what the pod has beyond that; and the GPUs,
    those of containers that are not there under REST. What an init container had, a later one has
    now."""
    present = {name: gpus for name, gpus in given.items() if name in live}
    taken = {gpu for gpus in present.values() for gpu in gpus}
    absent = (gpu for name, gpus in given.items() if name not in live for gpu in gpus)
    rest = tuple(dict.fromkeys(gpu for gpu in absent if gpu not in taken))
    amounts = {
        name: _container_amount(one, len(present.get(name, ()))) for name, one in live.items()
    }
    if pod.cpu_time is not None:
        total = _amount(pod.cpu_time, pod.memory_bytes, 0)
    else:
        before = [_container_amount(one, 0) for one in stopped]
        total = _sum([*amounts.values(), *before])
    pinned = bool(pod.annotations.get(PIN_KEY))
    if pinned:
        amounts |= _still_decided(pod, live, total, _sum(amounts.values()))
    used = _sum(amounts.values())
    cpus = max(0, total.cpus - used.cpus) if pinned else 0
    if pinned and used.cpus and not cpus:
        amounts = {name: one for name, one in amounts.items() if one != _Amount()}
        if rest:  # for who comes later, and has the CPUs of who is here now
            last = next(reversed(amounts))
            present[last] = (*present.get(last, ()), *rest)
            amounts[last] = replace(amounts[last], gpus=len(present[last]))
            rest = ()
    if cpus or rest:
        memory = total.memory_bytes and max(1, total.memory_bytes - (used.memory_bytes or 0))
        name = next(name for name in _names_of_rest() if name not in live)
        present |= {name: rest} if rest else {}
        amounts[name] = _Amount(
            request_milli=cpus * 1000, limit_milli=cpus * 1000, memory_bytes=memory, gpus=len(rest)
        )
    return present, amounts


def _still_decided(
    pod: RuntimePod, live: Mapping[str, RuntimeContainer], total: _Amount, used: _Amount
) -> dict[str, _Amount]:
    """The containers still to come that a scheduler has named with their CPUs, if there are so many
    left; what memory is left is theirs together."""
    decided = read_cpus_by_name(dict(pod.annotations))
    sizes = {name: len(cpus) for name, cpus in decided.items() if cpus and name not in live}
    if sum(sizes.values()) > total.cpus - used.cpus:
        return {}
    memory = total.memory_bytes and max(1, total.memory_bytes - (used.memory_bytes or 0))
    shares = [memory, *[memory and 1] * (len(sizes) - 1)]
    return {
        name: _Amount(request_milli=size * 1000, limit_milli=size * 1000, memory_bytes=share)
        for (name, size), share in zip(sizes.items(), shares, strict=False)
    }


def _names_of_rest() -> Iterator[str]:
    yield REST
    yield from (f"{REST}-{number}" for number in count(2))


def _sum(amounts: Iterable[_Amount]) -> _Amount:
    """All together; CPUs only of those that have whole ones, no memory if one has no limit."""
    every = tuple(amounts)
    milli = sum(one.cpus for one in every) * 1000
    limits = [one.memory_bytes for one in every if one.memory_bytes]
    memory = sum(limits) if limits and len(limits) == len(every) else None
    return _Amount(request_milli=milli, limit_milli=milli, memory_bytes=memory)


def _container_amount(container: RuntimeContainer, gpus: int) -> _Amount:
    """What a container has. One with a cpuset and without a quota is pinned, and its quota, which
    was its request, lifted."""
    amount = _amount(container.cpu_time, container.memory_bytes, gpus)
    if not container.cpus or amount.limit_milli:
        return amount
    milli = amount.request_milli
    if (container.cpu_time.shares or 0) >= _MOST_SHARES:
        milli = max(milli, 1000 * len(container.cpus))
    return replace(amount, request_milli=milli, limit_milli=milli)


def _amount(time: CpuTime, memory_bytes: int | None, gpus: int) -> _Amount:
    """Shares tell the request, to a thousandth below 256 CPUs; the quota tells the limit."""
    shares, quota_us = time.shares or 0, time.quota_us or 0
    request = -(-shares * 1000 // _SHARES_OF_A_CPU) if shares > _LEAST_SHARES else 0
    limit = quota_us * 1000 // time.period_us if quota_us > 0 and time.period_us else 0
    if shares >= _MOST_SHARES:
        request = max(request, limit)
    return _Amount(
        request_milli=request, limit_milli=limit, memory_bytes=memory_bytes or None, gpus=gpus
    )


def _as_spec(pod: RuntimePod, amounts: Mapping[str, _Amount]) -> Object:
    """The pod as Kubernetes would have it, as far as it is known."""
    namespace, _, name = pod.pod.partition("/")
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": pod.uid,
            "annotations": dict(pod.annotations),
        },
        "spec": {
            "containers": [
                {"name": name, "resources": _as_resources(amount)}
                for name, amount in amounts.items()
            ]
        },
    }


def _as_resources(amount: _Amount) -> Object:
    limits = {
        "cpu": f"{amount.limit_milli}m",
        "memory": amount.memory_bytes,
        GPU_RESOURCE: amount.gpus,
    }
    requests = {"cpu": f"{amount.request_milli}m", GPU_RESOURCE: amount.gpus}
    return {"requests": requests, "limits": {key: value for key, value in limits.items() if value}}
