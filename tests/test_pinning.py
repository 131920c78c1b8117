"""The cgroups follow the books: on trees of plain files as kubelet and runtimes make them.

Plain files hand nothing down, so what is in force is worked out here, by the kernel's rules. The
machine and its pods are those of the books' tests: CPUs 0-7 and 8-15, core 0-1 reserved.
"""

import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agent import pinning
from agent.books import Books, Node, Rules
from agent.config import Config
from agent.core.bitmap import Bitmap
from agent.core.podevents import PodEvent, Reason
from agent.core.pool import GroupPod
from agent.core.runtime import Cpuset, RuntimePod
from agent.edge.cgroup import Cgroups, find_cgroups
from agent.edge.status import Metrics
from agent.errors import PinError
from agent.fakes.cgroups import lay_out
from agent.pinning import Outcome, Pinning, carry_out
from agent.troubles import Troubles
from tests.test_books import (
    ALL,
    GIB,
    NEAR,
    NODE,
    PIN,
    WARN,
    Desk,
    container_of,
    cpus,
    pod_of,
    policy,
    sit,
)

FS = "sys/fs/cgroup"
CLASSES = ("burstable", "besteffort")
OWN = cpus("8-11")
"""What the first pod gets that is pinned beside GPU-2."""
POOL = ALL - OWN


@dataclass(frozen=True, slots=True)
class Host:
    """A host with kubelet's groups, of the cgroupfs driver. Paths are below kubepods."""

    root: Path
    version: int

    @property
    def cgroups(self) -> Cgroups:
        found = find_cgroups(str(self.root))
        assert found is not None
        return found

    def file(self, path: str, name: str) -> Path:
        hierarchy = "" if self.version == 2 else "cpuset/" if name.startswith("cpuset") else "cpu/"
        return self.root / FS / f"{hierarchy}kubepods" / path / name

    def make(self, path: str, set_: str | None = None, quota_us: int = -1, mems: str = "") -> None:
        """A group with these CPUs; without any as the kernel makes it, or runtimes on v1. So is the
        group above it, where there is none."""
        above = os.path.dirname(path)
        if path and not self.file(above, "cpuset.cpus").exists():
            self.make(above)
        text = set_ or ("" if self.version == 2 else str(ALL))
        self._put(path, "cpuset.cpus", text)
        self._put(path, "cpuset.mems", mems or ("" if self.version == 2 else "0-1"))
        if self.version == 2:
            self._put(path, "cpu.max", f"{'max' if quota_us < 0 else quota_us} 100000")
        else:
            self._put(path, "cpuset.memory_migrate", "0")
            self._put(path, "cpu.cfs_quota_us", str(quota_us))

    def _put(self, path: str, name: str, text: str) -> None:
        file = self.file(path, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def read(self, path: str, name: str = "cpuset.cpus") -> str:
        return self.file(path, name).read_text().strip()

    def quota(self, path: str) -> str:
        return self.read(path, "cpu.max" if self.version == 2 else "cpu.cfs_quota_us").split()[0]

    def effective(self, path: str) -> Bitmap:
        """The CPUs that the group's tasks run on."""
        if not path:
            return ALL
        own, above = cpus(self.read(path)), self.effective(os.path.dirname(path))
        if self.version == 1:
            assert own, path
            assert own <= above, path
            return own
        return own & above or above


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    """Kubelet's classes, and a pod of each class that is not pinned, with a container."""
    return make_host(tmp_path, request.param)


def make_host(root: Path, version: int) -> Host:
    host = Host(root, version)
    if version == 2:
        lay_out(root, {f"{FS}/cgroup.controllers": "cpuset cpu io memory pids\n"})
    else:
        lay_out(root, {f"{FS}/cpuset/cpuset.cpus": f"{ALL}\n", f"{FS}/cpu/": ""})
    host.make("")
    effective = "cpuset.{}.effective" if version == 2 else "cpuset.effective_{}"
    host._put("", effective.format("cpus"), str(ALL))
    host._put("", effective.format("mems"), "0-1")
    for path in (*CLASSES, *UNPINNED):
        host.make(path)
    return host


UNPINNED = ("burstable/podb/b_main", "besteffort/pode/e_main", "podu/u_main")


def desk_with(rules: Rules | None = None) -> Desk:
    """The books of a node with the pods of UNPINNED."""
    desk = sit(rules)
    for path in UNPINNED:
        uid = path.split("/")[-1].removesuffix("_main")
        pod = pod_of(uid, annotations={})
        desk.run(pod, container_of(pod, 0))
    return desk


@pytest.fixture
def desk() -> Desk:
    return desk_with()


A = "poda/a_main"


def run_pinned(
    host: Host,
    desk: Desk,
    *,
    written: str | None = str(OWN),
    started: bool = True,
    **more: Any,
) -> RuntimePod:
    """Pod a with 4 CPUs beside GPU-2; `written` is the cpuset that its container has."""
    pod = pod_of("a", 4, **more)
    desk.books.on_run_pod(pod)
    host.make("poda", quota_us=400_000)
    assert isinstance(desk.books.on_create(pod, container_of(pod, 4, [2], **more)), Cpuset)
    host.make(A, written, 400_000)
    if started:
        desk.books.on_start("a_main")
    return pod


def others(host: Host) -> list[Bitmap]:
    return [host.effective(path) for path in UNPINNED]


# --- the shared pool ------------------------------------------------------------------------------


@pytest.mark.parametrize("by_runtime", [True, False], ids=["by the runtime", "by us"])
def test_the_pool_narrows_and_widens(host: Host, desk: Desk, by_runtime: bool) -> None:
    assert carry_out(host.cgroups, desk.books, by_runtime).writes == 0
    pod = run_pinned(host, desk)
    outcome = carry_out(host.cgroups, desk.books, by_runtime)
    assert (outcome.drifted, outcome.troubles) == ((), ())
    assert outcome.writes > 0
    assert others(host) == [POOL] * 3
    assert host.effective(A) == OWN
    assert carry_out(host.cgroups, desk.books, by_runtime) == Outcome()
    desk.books.on_end_pod(pod.id)
    desk.books.settle(NODE, Rules())
    for path in (A, "poda"):
        for file in host.file(path, "cpuset.cpus").parent.iterdir():
            file.unlink()
        host.file(path, "cpuset.cpus").parent.rmdir()
    assert carry_out(host.cgroups, desk.books, by_runtime).troubles == ()
    assert others(host) == [ALL] * 3
    assert carry_out(host.cgroups, desk.books, by_runtime) == Outcome()


def test_the_pool_is_written_where_the_kernel_hands_it_down(tmp_path: Path) -> None:
    """On v2 two classes, and the pods that are in none, however many containers there are."""
    host, desk = make_host(tmp_path, 2), desk_with()
    for number in range(50):
        host.make(f"burstable/podmore{number}/x")
    run_pinned(host, desk)
    assert carry_out(host.cgroups, desk.books, True).writes <= 5
    assert host.effective("burstable/podmore49/x") == POOL


def test_a_group_that_nobody_told_of_is_in_the_pool(host: Host, desk: Desk) -> None:
    run_pinned(host, desk)
    host.make("podstatic/x")
    carry_out(host.cgroups, desk.books, True)
    assert host.effective("podstatic/x") == POOL


def test_who_is_near_its_gpus_is_narrowed_to_them(host: Host) -> None:
    desk = desk_with(NEAR)
    pod = pod_of("n", 2, {})
    desk.run(pod, container_of(pod, 2, [3]))
    host.make("podn/n_main", "8-15")
    run_pinned(host, desk)
    carry_out(host.cgroups, desk.books, True)
    assert host.effective("podn/n_main") == cpus("12-15")
    assert others(host) == [POOL] * 3


def test_books_without_a_machine_change_nothing(host: Host) -> None:
    host.make("podx/x", "3")
    assert carry_out(host.cgroups, sit(node=None).books, True) == Outcome()
    assert host.read("podx/x") == "3"


def test_without_kubepods_nothing_can_be_done(host: Host, desk: Desk) -> None:
    cgroups = host.cgroups
    host.file("", "cpuset.cpus").parent.rename(host.root / "gone")
    with pytest.raises(PinError, match="there is no such cgroup"):
        carry_out(cgroups, desk.books, True)


# --- pins -----------------------------------------------------------------------------------------


def test_the_runtime_makes_the_pins_of_containers_that_it_is_creating(
    host: Host, desk: Desk
) -> None:
    run_pinned(host, desk, written=None, started=False)
    before = host.read(A)
    outcome = carry_out(host.cgroups, desk.books, True)
    assert outcome.drifted == ()
    assert host.read(A) == before
    assert others(host) == [POOL] * 3


@pytest.mark.parametrize("started", [True, False], ids=["it runs", "it was created"])
def test_without_a_runtime_that_asks_we_make_the_pins(
    host: Host, desk: Desk, started: bool
) -> None:
    run_pinned(host, desk, written=None, started=started)
    assert carry_out(host.cgroups, desk.books, False).troubles == ()
    assert host.read(A) == str(OWN)
    assert host.effective(A) == OWN
    assert others(host) == [POOL] * 3


@pytest.mark.parametrize("by_runtime", [True, False], ids=["by the runtime", "by us"])
@pytest.mark.parametrize(
    "stray", ["0-15", "8-10", "0-3", "9-12"], ids=["all", "less", "others", "some others"]
)
def test_a_drift_is_repaired_and_told(host: Host, desk: Desk, stray: str, by_runtime: bool) -> None:
    run_pinned(host, desk)
    before = carry_out(host.cgroups, desk.books, by_runtime).pinned
    assert len(before) == 1
    for path in ("poda", A):
        host.file(path, "cpuset.cpus").write_text(f"{stray}\n")
    outcome = carry_out(host.cgroups, desk.books, by_runtime, before)
    assert ([one.name for one in outcome.drifted], outcome.troubles) == (["ns/a/main"], ())
    assert host.effective(A) == OWN
    assert carry_out(host.cgroups, desk.books, by_runtime) == Outcome()


def test_a_class_that_somebody_widened_is_narrowed_again(host: Host, desk: Desk) -> None:
    run_pinned(host, desk)
    carry_out(host.cgroups, desk.books, True)
    for path in ("burstable", "burstable/podb", "burstable/podb/b_main"):
        host.file(path, "cpuset.cpus").write_text(f"{ALL}\n")
    outcome = carry_out(host.cgroups, desk.books, True)
    assert outcome.drifted == ()  # nobody pinned was elsewhere
    assert others(host) == [POOL] * 3


def test_a_drift_beside_a_creation_is_told_when_it_is_repaired(host: Host, desk: Desk) -> None:
    run_pinned(host, desk)
    carry_out(host.cgroups, desk.books, True)
    pod = pod_of("c", 2)
    desk.books.on_run_pod(pod)
    desk.books.on_create(pod, container_of(pod, 2, [3]))  # the runtime is still making it
    host.file(A, "cpuset.cpus").write_text("8-10\n")
    outcome = carry_out(host.cgroups, desk.books, True)
    assert bool(outcome.drifted) is (host.effective(A) == OWN)


def test_a_pin_that_we_make_is_no_drift(host: Host, desk: Desk) -> None:
    run_pinned(host, desk, written=None, memory_bytes=GIB)
    assert carry_out(host.cgroups, desk.books, False).drifted == ()


def test_a_container_that_has_no_group_yet_is_no_trouble(host: Host, desk: Desk) -> None:
    pod = pod_of("a", 4, memory_bytes=GIB)
    desk.run(pod, container_of(pod, 4, [2], memory_bytes=GIB))
    outcome = carry_out(host.cgroups, desk.books, False)
    assert (outcome.drifted, outcome.troubles) == ((), ())
    assert others(host) == [POOL] * 3


def test_at_warn_a_refused_pod_runs_in_the_pool(host: Host) -> None:
    desk = desk_with(WARN)
    run_pinned(host, desk)
    desk.run_one("r", 9, [3], **policy("SingleNUMANode"))
    host.make("podr/r_main")
    carry_out(host.cgroups, desk.books, False)
    assert host.effective("podr/r_main") == POOL


# --- memory and quota -----------------------------------------------------------------------------


@pytest.mark.parametrize("by_runtime", [True, False], ids=["by the runtime", "by us"])
def test_memory_is_bound(host: Host, desk: Desk, by_runtime: bool) -> None:
    run_pinned(host, desk, memory_bytes=GIB)
    assert carry_out(host.cgroups, desk.books, by_runtime).troubles == ()
    assert host.read(A, "cpuset.mems") == "1"
    assert host.read("poda", "cpuset.mems") != "1"  # its sandbox stays as it is
    if host.version == 1:
        assert host.read(A, "cpuset.memory_migrate") == "1"
    assert carry_out(host.cgroups, desk.books, by_runtime) == Outcome()


def test_memory_that_is_bound_elsewhere_is_a_drift(host: Host, desk: Desk) -> None:
    run_pinned(host, desk, memory_bytes=GIB)
    carry_out(host.cgroups, desk.books, True)
    host.file(A, "cpuset.mems").write_text("0\n")
    outcome = carry_out(host.cgroups, desk.books, True)
    assert ([one.name for one in outcome.drifted], outcome.troubles) == (["ns/a/main"], ())
    assert host.read(A, "cpuset.mems") == "1"


def test_memory_that_is_not_bound_is_left_alone(host: Host, desk: Desk) -> None:
    run_pinned(host, desk)
    before = host.read(A, "cpuset.mems")
    carry_out(host.cgroups, desk.books, False)
    assert host.read(A, "cpuset.mems") == before


@pytest.mark.parametrize("by_runtime", [True, False], ids=["by the runtime", "by us"])
def test_the_quota_is_lifted_off_the_container_and_its_pod(
    host: Host, desk: Desk, by_runtime: bool
) -> None:
    host.make("podu", quota_us=50_000)
    run_pinned(host, desk)
    assert (host.quota("poda"), host.quota(A)) == ("400000", "400000")
    carry_out(host.cgroups, desk.books, by_runtime)
    none = "max" if host.version == 2 else "-1"
    assert (host.quota("poda"), host.quota(A)) == (none, none)
    assert host.quota("podu") == "50000"


@pytest.mark.parametrize(
    ("rules", "started"),
    [
        pytest.param(Rules(lift_quota=False), True, id="an administrator wants it"),
        pytest.param(Rules(), False, id="the runtime is still making the container"),
    ],
)
def test_the_quota_stays(host: Host, rules: Rules, started: bool) -> None:
    desk = desk_with(rules)
    run_pinned(host, desk, started=started)
    carry_out(host.cgroups, desk.books, True)
    assert (host.quota("poda"), host.quota(A)) == ("400000", "400000")


# --- what fails -----------------------------------------------------------------------------------


def block(file: Path) -> None:
    """No file is here that could be written."""
    file.unlink(missing_ok=True)
    file.mkdir()


@pytest.mark.parametrize(
    ("path", "name", "words"),
    [
        pytest.param("burstable", "cpuset.cpus", "burstable/cpuset.cpus", id="a class"),
        pytest.param("podu", "cpuset.cpus", "podu/cpuset.cpus", id="a pod"),
        pytest.param("podu/u_main", "cpuset.cpus", "u_main/cpuset.cpus", id="a container"),
        pytest.param(A, "cpuset.mems", "a_main/cpuset.mems", id="memory"),
    ],
)
def test_what_fails_is_told_and_the_rest_is_done(
    host: Host, desk: Desk, path: str, name: str, words: str
) -> None:
    run_pinned(host, desk, written=None, memory_bytes=GIB)
    block(host.file(path, name))
    outcome = carry_out(host.cgroups, desk.books, False)
    assert outcome.troubles
    assert all(words in trouble for trouble in outcome.troubles)
    assert host.read(A) == str(OWN)
    assert host.effective("besteffort/pode/e_main") == POOL


def test_a_quota_that_cannot_be_lifted_is_told(host: Host, desk: Desk) -> None:
    run_pinned(host, desk, written=None)
    name = "cpu.max" if host.version == 2 else "cpu.cfs_quota_us"
    block(host.file("poda", name))
    outcome = carry_out(host.cgroups, desk.books, False)
    (trouble,) = outcome.troubles
    assert f"poda/{name}" in trouble
    assert host.quota(A) in ("max", "-1")
    assert host.read(A) == str(OWN)


class LateBooks(Books):
    """Books to which something happens just after the pods were taken down."""

    happen: Callable[[], None] | None = None

    def group_pods(self) -> tuple[GroupPod, ...]:
        pods = super().group_pods()
        if self.happen is not None:
            happen, self.happen = self.happen, None
            happen()
        return pods


def test_who_is_pinned_meanwhile_is_not_taken_for_unpinned(host: Host) -> None:
    """Its group is there only after the groups were read."""
    books = LateBooks(lambda: None)
    books.settle(NODE, Rules())
    desk = Desk(books)
    books.happen = lambda: (run_pinned(host, desk), None)[1]
    outcome = carry_out(host.cgroups, books, True)
    assert (outcome.drifted, outcome.troubles) == ((), ())
    assert host.read(A) == str(OWN)
    carry_out(host.cgroups, books, True)
    assert host.effective(A) == OWN
    assert others(host) == [POOL] * 3


# --- who pins -------------------------------------------------------------------------------------


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged."""
    lines: list[str] = []
    logger = logging.getLogger("numalet")
    before = logger.level

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False

    logger.addFilter(keep)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeFilter(keep)
    logger.setLevel(before)


class Follower:
    """A Pinning and all that it sees."""

    def __init__(self, host: Host, desk: Desk, **options: Any) -> None:
        self.host = host
        self.desk = desk
        self.socket = host.root / "nri.sock"
        self.config = Config(
            root=str(host.root),
            nri_socket=str(self.socket),
            **{"kubelet_url": "http://127.0.0.1:1", **options},
        )
        self.metrics = Metrics()
        self.failed: list[str] = []
        self.told: list[PodEvent] = []
        self.pinning = Pinning(
            desk.books, self.metrics, Troubles(self.failed.append), self.told.extend
        )

    def serve(self) -> None:
        """A runtime that asks, and has told which pods it has."""
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(self.socket))
        self.pinning.on_synchronize([], [])

    def observe(self, observe_only: bool = False, **specs: object) -> None:
        node = replace(NODE, specs=specs if self.config.kubelet_url else None)
        self.pinning.observe(self.config, node, observe_only)
        rules = Rules(observe_only="kubelet pins CPUs itself" if observe_only else None)
        self.desk.books.settle(node, rules)
        self.pinning.follow()

    def paths(self) -> dict[str, float]:
        return {
            sample.labels["path"]: sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "numalet_pinning_path"
        }

    def count(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0


@pytest.fixture
def follower(tmp_path: Path) -> Follower:
    return Follower(make_host(tmp_path, 2), desk_with())


@pytest.mark.parametrize(
    ("connected", "served", "observe_only", "path"),
    [
        pytest.param(True, True, False, "nri", id="a runtime asks"),
        pytest.param(False, True, False, "nri", id="a runtime will ask"),
        pytest.param(True, False, False, "nri", id="a runtime asks, its socket was removed"),
        pytest.param(False, False, False, "cgroup", id="there is no runtime that asks"),
        pytest.param(True, True, True, "none", id="kubelet pins"),
        pytest.param(False, False, True, "none", id="kubelet pins, and no runtime asks"),
    ],
)
def test_who_pins(
    follower: Follower,
    said: list[str],
    connected: bool,
    served: bool,
    observe_only: bool,
    path: str,
) -> None:
    if served:
        follower.serve()
    follower.pinning.on_connection(connected)
    for _ in range(2):
        follower.observe(observe_only)
    assert follower.paths() == {path: 1}
    assert [line for line in said if line.startswith("pinning")] == [f"pinning path={path}"]


def test_who_pins_may_change(follower: Follower, said: list[str]) -> None:
    follower.observe()
    follower.serve()
    follower.observe()
    follower.observe(observe_only=True)
    lines = [line.removeprefix("pinning path=") for line in said if "pinning path" in line]
    assert lines == ["cgroup", "nri", "none"]
    assert follower.paths() == {"none": 1}


def test_where_kubelet_pins_no_cgroup_is_written(follower: Follower) -> None:
    follower.host.make("burstable", "3")
    follower.observe(observe_only=True)
    follower.pinning.follow()
    assert follower.host.read("burstable") == "3"


def test_before_it_is_known_who_pins_no_cgroup_is_written(follower: Follower) -> None:
    follower.host.make("burstable", "3")
    follower.pinning.follow()
    assert follower.host.read("burstable") == "3"


# --- following ------------------------------------------------------------------------------------


@pytest.mark.parametrize("served", [True, False], ids=["a runtime will tell", "kubelet will tell"])
def test_until_it_is_known_which_pods_there_are_no_cgroup_is_written(
    follower: Follower, served: bool
) -> None:
    """An agent that is new finds what the one before had pinned."""
    host = follower.host
    host.make("poda")
    host.make(A, str(OWN))
    for path in CLASSES:
        host.make(path, str(POOL))
    if served:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(follower.socket))
    node = replace(NODE, specs=None)
    for _ in range(2):
        follower.pinning.observe(follower.config, node, False)
        follower.desk.books.settle(node, Rules())
        follower.pinning.follow()
    assert follower.count("numalet_cpuset_writes_total") == 0
    assert host.effective(A) == OWN
    if served:
        follower.pinning.on_synchronize([], [])
    else:
        follower.observe()
    follower.pinning.follow()
    assert host.effective(A) == ALL  # nobody knows it


def test_the_cgroups_follow_what_happens(follower: Follower, said: list[str]) -> None:
    follower.serve()
    follower.observe()
    run_pinned(follower.host, follower.desk)
    follower.pinning.follow()  # before any pass
    assert others(follower.host) == [POOL] * 3
    writes = follower.count("numalet_cpuset_writes_total")
    assert writes > 0
    follower.pinning.follow()
    assert follower.count("numalet_cpuset_writes_total") == writes
    assert follower.count("numalet_cpuset_drifts_total") == 0
    assert not [line for line in said if "drift" in line]
    assert follower.told == []


def test_where_nothing_happens_they_are_looked_at_now_and_then(
    follower: Follower, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    follower.serve()
    follower.observe()
    run_pinned(follower.host, follower.desk)
    follower.observe()
    for path in ("poda", A):
        follower.host.make(path, str(ALL))
    follower.pinning.follow()
    assert follower.host.effective(A) == ALL
    monkeypatch.setattr(pinning, "_VERIFY_S", 0)
    follower.pinning.follow()
    assert follower.host.effective(A) == OWN
    assert follower.count("numalet_cpuset_drifts_total") == 1
    assert [line for line in said if "drift" in line] == ["drift repaired container=ns/a/main"]
    message = "main did not run on its CPUs 8-11 and was put back"
    assert follower.told == [
        PodEvent(uid="a", pod="ns/a", reason=Reason.DRIFTED, message=message, container="main")
    ]
    follower.pinning.follow()
    assert len(follower.told) == 1


def test_a_failure_is_said_once_and_tried_again(follower: Follower, said: list[str]) -> None:
    follower.serve()
    follower.observe()
    kubepods = follower.host.file("", "cpuset.cpus").parent
    kubepods.rename(follower.host.root / "away")
    run_late = container_of(pod_of("a", 4), 4, [2])
    follower.desk.books.on_create(pod_of("a", 4), run_late)
    for _ in range(3):
        follower.pinning.follow()
    assert len([line for line in said if line.startswith("cgroups reason=")]) == 1
    assert follower.failed == ["PinError"] * 3
    (follower.host.root / "away").rename(kubepods)
    follower.pinning.follow()
    assert others(follower.host) == [POOL] * 3
    assert "cgroups is well again" in said


def test_what_could_not_be_written_is_said_once(
    follower: Follower, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_VERIFY_S", 0)
    follower.serve()
    file = follower.host.file("burstable", "cpuset.cpus")
    block(file)
    for _ in range(3):
        follower.observe()
    (line,) = [line for line in said if "cpusets" in line]
    assert "burstable/cpuset.cpus" in line
    file.rmdir()
    file.write_text("\n")
    follower.observe()
    assert "cpusets is well again" in said


def test_before_kubelet_has_made_its_groups_nothing_is_wrong(
    tmp_path: Path, said: list[str]
) -> None:
    host = Host(tmp_path, 2)
    lay_out(tmp_path, {f"{FS}/cgroup.controllers": "cpuset cpu\n"})
    follower = Follower(host, sit())
    follower.observe()
    assert not follower.pinning.stirred()
    assert [line for line in said if "reason" in line] == []


# --- where no runtime asks ------------------------------------------------------------------------


def spec_of(uid: str, id_: str = "", count: int = 4, **more: Any) -> dict[str, Any]:
    """A pod as kubelet has it, with one container."""
    amounts = {"cpu": str(count), "aliyun.com/gpu": "1"}
    status = {"name": "main", "containerID": f"containerd://{id_ or f'{uid}_main'}", "state": {}}
    return {
        "metadata": {"namespace": "ns", "name": uid, "uid": uid, "annotations": PIN} | more,
        "spec": {
            "containers": [{"name": "main", "resources": {"requests": amounts, "limits": amounts}}]
        },
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


@pytest.fixture
def alone(host: Host) -> Follower:
    """No runtime tells of pods; kubelet does."""
    return Follower(host, sit())


def test_what_kubelet_tells_is_pinned_in_the_cgroups(alone: Follower, said: list[str]) -> None:
    alone.host.make("poda", quota_us=400_000)
    alone.host.make(A, quota_us=400_000)
    alone.observe(a=spec_of("a"))
    held = alone.desk.held()["a/main"]
    assert len(held) == 4
    assert alone.host.effective(A) == held
    assert others(alone.host) == [ALL - held] * 3
    assert alone.host.quota(A) in ("max", "-1")
    alone.observe(a=spec_of("a"))
    assert alone.desk.held() == {"a/main": held}
    alone.observe()
    assert others(alone.host) == [ALL] * 3


def test_what_runs_pinned_is_adopted_from_its_cgroup(alone: Follower) -> None:
    """By an agent that knows nothing, and would choose others."""
    alone.host.make("poda")
    alone.host.make(A, "9,11-13")
    alone.observe(a=spec_of("a"))
    assert alone.desk.held() == {"a/main": cpus("9,11-13")}
    assert alone.host.effective(A) == cpus("9,11-13")
    assert others(alone.host) == [ALL - cpus("9,11-13")] * 3


def test_pods_that_come_and_go_are_noticed(alone: Follower) -> None:
    alone.observe()
    assert not alone.pinning.stirred()
    alone.host.make("podnew")
    assert alone.pinning.stirred()
    alone.observe()
    assert not alone.pinning.stirred()
    alone.host.make("burstable/podmore")
    assert alone.pinning.stirred()


def test_groups_that_cannot_be_read_leave_what_was_known(alone: Follower, said: list[str]) -> None:
    alone.host.make("poda")
    alone.host.make(A, "9,11-13")
    alone.observe(a=spec_of("a"))
    name = "cpuset.cpus.effective" if alone.host.version == 2 else "cpuset.effective_cpus"
    block(alone.host.file("", name))
    alone.observe(a=spec_of("a"))
    assert alone.desk.held() == {"a/main": cpus("9,11-13")}
    assert any(line.startswith("cgroups reason=") for line in said)
    assert set(alone.failed) == {"PinError"}


def test_a_class_that_cannot_be_listed_stirs_nothing(alone: Follower) -> None:
    alone.host.file("burstable", "").rename(alone.host.root / "away")
    alone.host.file("burstable", "").symlink_to("burstable")
    for _ in range(2):
        alone.observe()
        assert not alone.pinning.stirred()


def test_where_a_runtime_tells_pods_are_looked_for_too(follower: Follower) -> None:
    follower.serve()
    follower.observe()
    assert not follower.pinning.stirred()
    follower.host.make("podnew")
    assert follower.pinning.stirred()


@pytest.mark.parametrize("seen", [True, False], ids=["its cgroup was there", "it has none yet"])
def test_a_pod_ends_when_its_cgroup_goes_though_nobody_tells(host: Host, seen: bool) -> None:
    follower = Follower(host, desk_with())
    follower.serve()
    follower.pinning.on_connection(True)
    pod = pod_of("late", 4)
    follower.desk.run(pod, container_of(pod, 4, [2]))
    if seen:
        host.make("podlate")
        follower.observe()
        for folder in list(host.root.rglob("podlate")):
            shutil.rmtree(folder)
    follower.observe()
    assert bool(follower.desk.held()) is not seen


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:1"], ids=["no URL", "a URL"])
def test_who_cannot_know_what_pods_ask_says_so(host: Host, said: list[str], url: str) -> None:
    Follower(host, sit(), kubelet_url=url).observe()
    blind = [line for line in said if "pods are not known" in line]
    assert len(blind) == (url == "")


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(
            "",
            id="nobody tells of pods",
        ),
        pytest.param("http://127.0.0.1:1", id="kubelet tells of them"),
    ],
)
def test_what_runs_pinned_stays_when_the_runtime_ends(host: Host, url: str) -> None:
    """It removes its socket, and its containers run on until it is back."""
    follower = Follower(host, desk_with(), kubelet_url=url)
    follower.serve()
    follower.pinning.on_connection(True)
    follower.observe()
    run_pinned(host, follower.desk)
    specs = {"a": spec_of("a")} if url else {}
    follower.observe(**specs)
    assert others(host) == [POOL] * 3
    follower.pinning.on_connection(False)
    follower.socket.unlink()
    follower.observe(**specs)
    assert follower.desk.held() == {"a/main": OWN}
    assert host.effective(A) == OWN
    assert others(host) == [POOL] * 3


def test_a_pod_gets_no_cpus_that_only_look_like_its_own(tmp_path: Path) -> None:
    """On v1 a container starts with the CPUs of the group above, here just as many as it asks."""
    host = make_host(tmp_path, 1)
    follower = Follower(host, sit(node=None))
    node = Node(machine=NODE.machine)  # no CPU is reserved: one core is to stay shared
    for uid, count in (("a", 12), ("b", 4)):
        host.make(f"pod{uid}")
        host.make(f"pod{uid}/{uid}_main")
        specs = {uid: spec_of(uid, count=count)}
        if uid == "b":
            specs["a"] = spec_of("a", count=12)
            pool = str(follower.desk.pool)
            host.make("podb", pool)
            host.make("podb/b_main", pool)
        now = replace(node, specs=specs)
        follower.pinning.observe(follower.config, now, False)
        follower.desk.books.settle(now, Rules())
        follower.pinning.follow()
    assert follower.desk.held().keys() == {"a/main"}
    assert follower.desk.pool == host.effective("podb/b_main")
