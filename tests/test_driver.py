"""agent.driver against the real pynvml and a fake of the driver's library, in a thread as in life.

Expected values are those that the test wrote into the fake's text file, turned by hand. Probes and
pauses come more often than in life, so that nothing takes long.
"""

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from agent import driver as under_test
from agent.core.health import HEALTHY, Health, HealthPolicy, Trouble, Xid
from agent.driver import Driver, DriverSettings, Known, Listener
from agent.edge.nvml import Pace, watch_driver
from agent.edge.nvml.child import stuck
from agent.fakes import nvml as fake

DEADLINE_S = 20.0
"""After which a test gives up; nothing waits for it to pass."""

FOUR = [
    fake.FakeGpu(bdf=f"0000:{0x1A + i:02x}:00.0", uuid=f"GPU-{i}", memory=80 << 30, mig=0)
    for i in range(4)
]
UUIDS = [gpu.uuid for gpu in FOUR]
INIT = "nvmlInitWithFlags"
MEMORY = "nvmlDeviceGetMemoryInfo"
LOST = "the GPU fell off the bus or was lost; it needs a reset or the machine a reboot"
NOT_LOADED = f"the NVIDIA driver is not loaded ({INIT})"
GONE = "driver does not list it any more"

PACE = Pace(probe_s=0.02, silent_s=60, renew_s=0.1)
AT_ONCE = HealthPolicy(recovery_s=0)


class Follower:
    """A driver that is followed, and what it told."""

    def __init__(self, settings: DriverSettings, known: Known) -> None:
        self.news = 0
        self.answers: list[bool] = []
        self.xids: list[Xid] = []
        self.known_at_problems: list[Known] = []
        listener = Listener(
            on_news=self._on_news, on_answer=self._on_answer, on_xid=self.xids.append
        )
        self._begun, self._closed = threading.Event(), False
        self.driver = Driver(settings, known, listener)
        self._begun.set()

    def _on_news(self) -> None:
        self.news += 1

    def _on_answer(self, ok: bool) -> None:
        self._begun.wait()
        self.answers.append(ok)
        if not ok:
            self.known_at_problems.append(self.driver.known)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.driver.close()

    @property
    def known(self) -> Known:
        return self.driver.known

    def reasons(self) -> dict[str, str | None]:
        """Why each GPU is unhealthy."""
        return {uuid: health.reason for uuid, health in self.known.healths.items()}

    def faults(self) -> dict[str | None, str | None]:
        """What the reading says of each GPU."""
        gpus = self.known.reading.gpus if self.known.reading else ()
        return {gpu.uuid: gpu.fault for gpu in gpus}

    def wait(self, is_met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_met():
            assert time.monotonic() < deadline, self.known
            time.sleep(0.005)

    def wait_for_reasons(self, **reasons: str) -> None:
        """Until the GPUs are unhealthy for these reasons, all others healthy. GPU-1 is `GPU1`."""
        expected = {uuid: reasons.get(str(uuid).replace("-", "")) for uuid in UUIDS}
        self.wait(lambda: self.reasons() == expected)


Follow = Callable[..., Follower]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake driver's text file is to be; without it no driver is loaded."""
    path = tmp_path / "nvml.txt"
    monkeypatch.setenv(fake.ENVIRONMENT, str(path))
    return path


@pytest.fixture
def loaded(state: Path) -> Path:
    """A driver with four sound GPUs."""
    fake.write_state(state, fake.format_state(FOUR))
    return state


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails the test that leaves threads, children or descriptors behind."""
    before = leavings()
    yield
    deadline = time.monotonic() + DEADLINE_S
    while more := leavings() - before:
        assert time.monotonic() < deadline, more
        time.sleep(0.005)


def leavings() -> Counter[str]:
    found = Counter(thread.name for thread in threading.enumerate() if thread.name == "driver")
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0]] += 1
        except OSError:  # that of the listing itself
            continue
    found["children"] = len(children())
    return found


def children() -> list[psutil.Process]:
    """Those that live; one that was killed and took long to die is reaped."""
    for pid in tuple(stuck):
        if os.waitpid(pid, os.WNOHANG)[0]:
            stuck.remove(pid)
    return psutil.Process().children()


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """What the agent says, line by line."""
    logger, lines = logging.getLogger("numalet"), list[str]()

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    level = logger.level
    logger.addFilter(keep)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeFilter(keep)
    logger.setLevel(level)


@pytest.fixture
def follow(
    library: str, state: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Follow]:
    monkeypatch.setattr(under_test, "watch_driver", partial(watch_driver, pace=PACE))
    monkeypatch.setattr(under_test, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(under_test, "_LONGEST_PAUSE_S", 0.1)
    followers = []

    def follow(
        known: Known | None = None, policy: HealthPolicy = AT_ONCE, **other: object
    ) -> Follower:
        settings = DriverSettings(library=library, timeout_s=30, policy=policy, by_index=False)
        followers.append(Follower(replace(settings, **other), known or Known()))
        return followers[-1]

    yield follow
    for follower in followers:
        follower.close()


# --- reading --------------------------------------------------------------------------------------


def test_a_driver_is_read_and_told_of(loaded: Path, follow: Follow) -> None:
    follower = follow()
    follower.wait(lambda: follower.news == 1)
    assert follower.faults() == dict.fromkeys(UUIDS)
    assert follower.known.reading is not None
    assert [gpu.bdf for gpu in follower.known.reading.gpus] == [gpu.bdf for gpu in FOUR]
    assert follower.known.healths == dict.fromkeys(UUIDS, HEALTHY)
    assert follower.answers == [True]


def test_what_stays_as_it_was_is_no_news(loaded: Path, follow: Follow) -> None:
    follower = follow()
    follower.wait(lambda: follower.news == 1)
    before = follower.known.reading
    for round_ in range(1, 6):  # each Xid is heard between two probes
        fake.add_line(loaded, fake.event(0, 31))
        follower.wait(lambda count=round_: len(follower.xids) == count)
    assert follower.news == 1
    assert follower.known.reading is before


def test_a_driver_that_is_not_loaded_is_asked_until_it_is(
    state: Path, follow: Follow, log_lines: list[str]
) -> None:
    follower = follow()
    follower.wait(lambda: follower.answers.count(False) >= 4)
    assert follower.known.reading is not None
    assert follower.known.reading.problem == NOT_LOADED
    assert follower.known.reading.gpus == ()
    assert follower.known.healths == {}
    fake.write_state(state, fake.format_state(FOUR))
    follower.wait(lambda: follower.faults() == dict.fromkeys(UUIDS))
    assert follower.known.reading.problem is None
    assert follower.known.failures == 0
    assert follower.answers[-1]
    said = [line for line in log_lines if line.startswith("gpu driver")]
    assert said == [f'gpu driver reason="{NOT_LOADED}"']


def test_a_library_that_is_not_there(follow: Follow, tmp_path: Path) -> None:
    follower = follow(library=str(tmp_path / "libnvidia-ml.so.1"))
    follower.wait(lambda: follower.known.reading is not None)
    assert follower.known.reading is not None
    assert follower.known.reading.problem is not None
    assert follower.known.reading.problem.startswith("the GPU driver's library cannot be loaded")


def test_gpus_that_come_later(state: Path, follow: Follow) -> None:
    fake.write_state(state, fake.format_state(FOUR[:2]))
    follower = follow()
    follower.wait(lambda: len(follower.faults()) == 2)
    fake.write_state(state, fake.format_state(FOUR, [fake.fail(MEMORY, 15, 0)]))
    follower.wait(lambda: len(follower.faults()) == 4)  # a GPU that is ill begins a new session
    assert follower.known.healths["GPU-3"] is HEALTHY


# --- health ---------------------------------------------------------------------------------------


def test_a_gpu_that_is_lost_and_comes_back(
    loaded: Path, follow: Follow, log_lines: list[str]
) -> None:
    follower = follow()
    follower.wait_for_reasons()
    fake.add_line(loaded, fake.fail(MEMORY, 15, 1))
    follower.wait(lambda: follower.known.healths["GPU-1"].trouble is Trouble.LOST)
    news = follower.news
    assert str(follower.reasons()["GPU-1"]).startswith(LOST)
    assert [reason for uuid, reason in follower.reasons().items() if uuid != "GPU-1"] == [None] * 3
    fake.remove_line(loaded, fake.fail(MEMORY, 15, 1))
    follower.wait_for_reasons()
    assert follower.news > news
    assert "gpu healthy gpu=GPU-1" in log_lines
    (line,) = (line for line in log_lines if line.startswith("gpu unhealthy"))
    assert line.startswith(f'gpu unhealthy gpu=GPU-1 trouble=lost reason="{LOST}')


def test_a_gpu_that_is_not_listed_any_more_stays_known(loaded: Path, follow: Follow) -> None:
    follower = follow()
    follower.wait_for_reasons()
    # A GPU that is ill begins a new session, in which the last one is missing.
    fake.write_state(loaded, fake.format_state(FOUR[:3], [fake.fail(MEMORY, 15, 0)]))
    follower.wait(lambda: GONE in str(follower.faults()["GPU-3"]))
    assert GONE in str(follower.reasons()["GPU-3"])
    fake.write_state(loaded, fake.format_state(FOUR))
    follower.wait_for_reasons()
    follower.wait(lambda: follower.faults() == dict.fromkeys(UUIDS))


def test_an_xid_makes_a_gpu_unhealthy_until_it_was_sound_for_long_enough(
    loaded: Path, follow: Follow, log_lines: list[str]
) -> None:
    follower = follow(policy=HealthPolicy(recovery_s=0.2))
    follower.wait_for_reasons()
    fake.add_line(loaded, fake.event(2, 94))
    follower.wait(lambda: follower.xids == [Xid(uuid="GPU-2", code=94)])
    follower.wait(lambda: "gpu healthy gpu=GPU-2" in log_lines)
    follower.wait_for_reasons()
    sentence = "a memory error that hit one program only"
    assert f'xid gpu=GPU-2 xid=94 meaning="Xid 94: {sentence}"' in log_lines
    assert f'gpu unhealthy gpu=GPU-2 trouble=error reason="Xid 94: {sentence}"' in log_lines


def test_a_gpu_that_was_never_sound_for_long_enough_stays_unhealthy(
    loaded: Path, follow: Follow
) -> None:
    follower = follow(policy=HealthPolicy(recovery_s=3600))
    follower.wait_for_reasons()
    fake.add_line(loaded, fake.event(2, 94))
    follower.wait(lambda: follower.known.healths["GPU-2"].sound_since_s is not None)
    assert follower.reasons()["GPU-2"] is not None


def test_ignored_xids_are_told_and_change_nothing(loaded: Path, follow: Follow) -> None:
    follower = follow(policy=HealthPolicy(ignored_xids=frozenset({79}), recovery_s=3600))
    follower.wait_for_reasons()
    fake.add_line(loaded, fake.event(0, 79))
    fake.add_line(loaded, fake.event(1, 31))  # of an application, but not ignored here
    follower.wait(lambda: len(follower.xids) == 2)
    follower.wait_for_reasons(GPU1="Xid 31: a program used GPU memory that is not its own")


def test_an_xid_of_no_gpu_concerns_all(loaded: Path, follow: Follow) -> None:
    follower = follow(policy=HealthPolicy(recovery_s=3600))
    follower.wait_for_reasons()
    fake.add_line(loaded, fake.event("*", 92))
    reason = "Xid 92: memory errors are corrected very often"
    follower.wait_for_reasons(**dict.fromkeys(("GPU0", "GPU1", "GPU2", "GPU3"), reason))
    assert follower.xids == [Xid(uuid=None, code=92)]


def test_after_an_xid_that_needs_a_reset_sound_probes_prove_nothing(
    loaded: Path, follow: Follow
) -> None:
    follower = follow()
    follower.wait_for_reasons()
    fake.add_line(loaded, fake.event(3, 79))
    follower.wait_for_reasons(GPU3="Xid 79: the GPU has fallen off the bus")
    fake.add_line(loaded, fake.event(0, 94))  # it recovers by the probes that follow
    follower.wait(lambda: len(follower.xids) == 2)
    follower.wait_for_reasons(GPU3="Xid 79: the GPU has fallen off the bus")
    fake.add_line(loaded, fake.fail("*", 15, 3))  # the reset
    follower.wait(lambda: LOST in str(follower.reasons()["GPU-3"]))
    fake.remove_line(loaded, fake.fail("*", 15, 3))
    follower.wait_for_reasons()


def test_where_kubelet_knows_gpus_by_index_one_that_is_renumbered_is_not_given_out(
    loaded: Path, follow: Follow
) -> None:
    follower = follow(by_index=True)
    follower.wait_for_reasons()
    moved = [FOUR[1], FOUR[0], *FOUR[2:]]
    fake.write_state(loaded, fake.format_state(moved, [fake.fail(MEMORY, 15, 3)]))
    follower.wait(lambda: follower.faults()["GPU-0"] is not None)
    assert follower.faults()["GPU-0"] == "the driver calls it GPU 1 now, and kubelet GPU 0"
    assert follower.faults()["GPU-1"] == "the driver calls it GPU 0 now, and kubelet GPU 1"
    assert follower.faults()["GPU-2"] is None


# --- patience with the driver as a whole ----------------------------------------------------------


def end_child() -> None:
    """Ends the process that watches the driver, as somebody from outside may."""
    for child in children():
        child.send_signal(signal.SIGKILL)


def test_a_child_that_somebody_ends_is_followed_by_another_and_no_gpu_suffers(
    loaded: Path, follow: Follow
) -> None:
    follower = follow()
    follower.wait_for_reasons()
    end_child()
    follower.wait(lambda: len(follower.answers) == 2)
    assert follower.news == 1
    assert follower.reasons() == dict.fromkeys(UUIDS)


def test_a_driver_that_fails_must_do_so_three_times_before_its_gpus_count_as_unusable(
    loaded: Path, follow: Follow
) -> None:
    follower = follow()
    follower.wait_for_reasons()
    fake.add_line(loaded, fake.fail(INIT, 9))  # the session that is open does not mind
    end_child()
    follower.wait(lambda: NOT_LOADED in follower.faults().values())
    assert [known.failures for known in follower.known_at_problems[:3]] == [0, 1, 2]
    for known in follower.known_at_problems[:3]:
        assert known.healths == dict.fromkeys(UUIDS, HEALTHY)
        assert known.reading is not None
        assert [gpu.fault for gpu in known.reading.gpus] == [None] * 4
    assert follower.faults() == dict.fromkeys(UUIDS, NOT_LOADED)
    follower.wait_for_reasons(**dict.fromkeys(("GPU0", "GPU1", "GPU2", "GPU3"), NOT_LOADED))

    fake.remove_line(loaded, fake.fail(INIT, 9))
    follower.wait_for_reasons()
    assert follower.faults() == dict.fromkeys(UUIDS)
    assert follower.known.failures == 0


def test_two_failures_are_forgotten_when_the_driver_answers(loaded: Path, follow: Follow) -> None:
    follower = follow()
    follower.wait_for_reasons()
    for _ in range(3):
        answers = len(follower.answers)
        fake.add_line(loaded, fake.fail(INIT, 9))
        end_child()
        follower.wait(lambda seen=answers: False in follower.answers[seen:])
        fake.remove_line(loaded, fake.fail(INIT, 9))
        follower.wait(lambda seen=answers: True in follower.answers[seen:])
        follower.wait(lambda: follower.known.failures == 0)
    assert follower.known_at_problems
    assert max(known.failures for known in follower.known_at_problems) < 3
    assert follower.reasons() == dict.fromkeys(UUIDS)


def test_a_driver_that_goes_away_under_a_watch_and_comes_back(loaded: Path, follow: Follow) -> None:
    follower = follow()
    follower.wait_for_reasons()
    text = loaded.read_text()
    loaded.unlink()
    follower.wait(lambda: None not in follower.reasons().values())
    follower.wait(lambda: len(follower.known_at_problems) >= 4)
    assert set(follower.faults()) == set(UUIDS)  # they stay listed
    fake.write_state(loaded, text)
    follower.wait_for_reasons()
    assert follower.faults() == dict.fromkeys(UUIDS)


def test_a_driver_that_crashes_makes_all_gpus_unhealthy_until_it_answers(
    loaded: Path, follow: Follow
) -> None:
    follower = follow()
    follower.wait_for_reasons()
    fake.add_line(loaded, fake.crash(MEMORY, 0))
    follower.wait(lambda: None not in follower.reasons().values())
    fake.remove_line(loaded, fake.crash(MEMORY, 0))
    follower.wait_for_reasons()


# --- beginning again and ending -------------------------------------------------------------------


ILL = Health(reason="Xid 79: the GPU has fallen off the bus", needs_reset=True)


def test_a_new_one_goes_on_from_what_the_old_one_knew(loaded: Path, follow: Follow) -> None:
    old = follow()
    old.wait_for_reasons()
    fake.write_state(loaded, fake.format_state(FOUR[:3]))
    new = follow(known=replace(old.known, healths={**old.known.healths, "GPU-1": ILL}))
    new.wait(lambda: GONE in str(new.faults()["GPU-3"]))
    assert GONE in str(new.reasons()["GPU-3"])
    assert new.reasons() | {"GPU-3": None} == dict.fromkeys(UUIDS) | {"GPU-1": ILL.reason}


def test_a_new_one_keeps_what_was_known_while_the_driver_is_away(
    loaded: Path, state: Path, follow: Follow
) -> None:
    old = follow()
    old.wait_for_reasons()
    known = old.known
    old.close()
    state.unlink()
    new = follow(known=known)
    assert set(new.faults()) == set(UUIDS)
    new.wait(lambda: len(new.answers) >= 4)
    new.wait(lambda: new.faults() == dict.fromkeys(UUIDS, NOT_LOADED))


HANGS = {
    "in its first call": fake.hang(INIT),
    "while GPUs are read": fake.hang("nvmlDeviceGetUUID"),
}


@pytest.mark.parametrize("line", HANGS.values(), ids=HANGS)
def test_the_end_while_the_driver_hangs_and_nothing_is_known(
    loaded: Path, follow: Follow, line: str
) -> None:
    fake.add_line(loaded, line)
    follower = follow()
    follower.wait(lambda: len(children()) == 1)
    follower.close()
    assert_ended()
    assert follower.known == Known()


def test_the_end_while_a_gpu_hangs(loaded: Path, follow: Follow) -> None:
    follower = follow()
    follower.wait_for_reasons()
    fake.add_line(loaded, fake.hang("*"))
    follower.close()
    assert_ended()
    assert follower.reasons() == dict.fromkeys(UUIDS)


def test_the_end_during_a_pause(
    state: Path, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "_FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(under_test, "_LONGEST_PAUSE_S", 3600.0)
    follower = follow()
    follower.wait(lambda: follower.answers == [False])
    follower.close()
    assert_ended()


def assert_ended() -> None:
    """Of what close() ended nothing runs on."""
    deadline = time.monotonic() + DEADLINE_S
    while "driver" in [thread.name for thread in threading.enumerate()] or children():
        assert time.monotonic() < deadline
        time.sleep(0.005)
