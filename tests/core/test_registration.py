"""When to listen and register: a table of situations, and a simulated kubelet that fails in every
way that a real one is known to. Expected times are worked out by hand from the docstrings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from agent.core.registration import (
    Registration,
    Seen,
    SocketId,
    Step,
    after_attempt,
    next_step,
    pause_s,
)

WAIT, LISTEN, END_STREAM, REGISTER = Step.WAIT, Step.LISTEN, Step.END_STREAM, Step.REGISTER
OLD, NEW = (7, 1000), (7, 2000)  # an inode may come again, with another ctime


def seen(
    now_s: float = 100.0,
    kubelet: SocketId | None = OLD,
    listening: bool = True,
    streams: int = 0,
    opened: int = 0,
) -> Seen:
    return Seen(now_s=now_s, kubelet=kubelet, listening=listening, streams=streams, opened=opened)


# --- a table of situations ------------------------------------------------------------------------

FRESH = Registration()
ACCEPTED = Registration(tried=OLD, registered=OLD, registered_s=99.0)
STREAMING = Registration(tried=OLD, registered=OLD, registered_s=50.0, streaming=True)
REFUSED = Registration(tried=OLD, failures=6, not_before_s=103.0)


class Row(NamedTuple):
    """What was done, what is seen, and what is to be done now."""

    state: Registration
    seen: Seen
    step: Step


SITUATIONS = {
    "without kubelet nothing is done": Row(FRESH, seen(kubelet=None, listening=False), WAIT),
    "without kubelet nothing is done though we listen": Row(FRESH, seen(kubelet=None), WAIT),
    "without kubelet's socket an open stream stays": Row(
        STREAMING, seen(kubelet=None, streams=1), WAIT
    ),
    "without kubelet's socket an open stream stays, though our socket is gone": Row(
        STREAMING, seen(kubelet=None, listening=False, streams=1), WAIT
    ),
    "listening comes first": Row(FRESH, seen(listening=False), LISTEN),
    "then registering, at once": Row(FRESH, seen(now_s=0.0), REGISTER),
    "a registration that was accepted waits for its stream": Row(ACCEPTED, seen(), WAIT),
    "it waits for 3 s": Row(ACCEPTED, seen(now_s=101.9), WAIT),
    "an open stream is left alone": Row(ACCEPTED, seen(streams=1, opened=1), WAIT),
    "an old stream is left alone": Row(STREAMING, seen(now_s=9999.0, streams=1, opened=1), WAIT),
    "our socket is gone": Row(ACCEPTED, seen(listening=False), LISTEN),
    "our socket is gone, its stream is open": Row(
        STREAMING, seen(listening=False, streams=1, opened=1), END_STREAM
    ),
    "our socket is gone, a registration waits for its time": Row(
        REFUSED, seen(listening=False), LISTEN
    ),
    "a new kubelet is registered with at once": Row(ACCEPTED, seen(kubelet=NEW), REGISTER),
    "a new kubelet is registered with at once, however often the old one refused": Row(
        REFUSED, seen(kubelet=NEW), REGISTER
    ),
    "a new kubelet is registered with at once, whatever became of the old one's stream": Row(
        Registration(tried=OLD, registered=OLD, registered_s=50.0),
        seen(kubelet=NEW, opened=1),
        REGISTER,
    ),
    "a new kubelet is registered with after the stream of the old one": Row(
        STREAMING, seen(kubelet=NEW, streams=1, opened=1), END_STREAM
    ),
    "a new kubelet has deleted our socket": Row(
        ACCEPTED, seen(kubelet=NEW, listening=False), LISTEN
    ),
    "after a refusal its pause is waited for": Row(REFUSED, seen(now_s=102.9), WAIT),
    "after a refusal and its pause comes the next attempt": Row(
        REFUSED, seen(now_s=103.0), REGISTER
    ),
    "a stream whose registration counts as refused is ended": Row(
        REFUSED, seen(streams=1, opened=1), END_STREAM
    ),
    "a stream just ended: kubelet is left in peace": Row(STREAMING, seen(opened=1), WAIT),
    "a stream came and went unseen: it is noticed": Row(ACCEPTED, seen(opened=1), WAIT),
}


@pytest.mark.parametrize("row", SITUATIONS.values(), ids=SITUATIONS)
def test_what_is_done_in_which_situation(row: Row) -> None:
    _, step = next_step(row.state, row.seen)
    assert step is row.step


@pytest.mark.parametrize("row", SITUATIONS.values(), ids=SITUATIONS)
def test_seeing_the_same_again_changes_nothing(row: Row) -> None:
    state, step = next_step(row.state, row.seen)
    assert next_step(state, row.seen) == (state, step)


def first_attempt_s(state: Registration, start_s: float, **facts: int) -> float:
    """When the next attempt is due, looking ten times a second at something that stays."""
    for tenth in range(1000):
        now_s = start_s + tenth / 10
        state, step = next_step(state, seen(now_s=now_s, **facts))
        if step is REGISTER:
            return now_s
    raise AssertionError("there is no attempt in 100 s")


PATIENCE = {
    "a stream that ended: after half a second": (STREAMING, {"opened": 1}, 100.5),
    "a stream that ended after many failures: after a longer pause": (
        Registration(tried=OLD, registered=OLD, registered_s=99.0, failures=5, streaming=True),
        {"opened": 1},
        103.2,
    ),
    "a stream that came and went unseen: after half a second, too": (
        ACCEPTED,
        {"opened": 1},
        100.5,
    ),
    "a stream that never opened: 3 s after the registration, and a pause": (ACCEPTED, {}, 102.1),
    "a stream that never opened, time and again: 5 s later": (
        Registration(tried=OLD, registered=OLD, registered_s=99.0, failures=30),
        {},
        107.0,
    ),
}


@pytest.mark.parametrize(("state", "facts", "due_s"), PATIENCE.values(), ids=PATIENCE)
def test_how_long_the_next_attempt_waits(
    state: Registration, facts: dict[str, int], due_s: float
) -> None:
    assert first_attempt_s(state, 100.0, **facts) == pytest.approx(due_s, abs=0.11)


def test_a_stream_that_came_and_went_unseen_is_noticed_at_once() -> None:
    assert first_attempt_s(ACCEPTED, 100.0, opened=1) <= 100.6


def test_a_new_socket_of_ours_is_registered_at_once() -> None:
    state, step = next_step(ACCEPTED, seen(listening=False))
    assert step is LISTEN
    _, step = next_step(state, seen())
    assert step is REGISTER


def test_a_kubelet_whose_socket_is_out_of_sight_for_a_moment_is_the_same() -> None:
    state, _ = next_step(STREAMING, seen(kubelet=None, streams=1, opened=1))
    _, step = next_step(state, seen(streams=1, opened=1))
    assert step is WAIT


def test_a_new_kubelet_that_refuses_is_asked_as_patiently_as_the_first() -> None:
    state, step = next_step(REFUSED, seen(kubelet=NEW))
    assert step is REGISTER
    after = after_attempt(state, seen(kubelet=NEW), 100.0, False, 1.0)
    assert after.not_before_s == pytest.approx(100.1)


def test_a_stream_that_holds_for_ten_seconds_makes_the_next_trouble_a_new_one() -> None:
    state = Registration(tried=OLD, registered=OLD, registered_s=100.0, opened=0, failures=6)
    young, _ = next_step(state, seen(now_s=109.0, streams=1, opened=1))
    old, _ = next_step(young, seen(now_s=110.0, streams=1, opened=1))
    assert first_attempt_s(young, 109.5, opened=1) == pytest.approx(114.5, abs=0.11)
    assert first_attempt_s(old, 110.5, opened=1) == pytest.approx(111.0, abs=0.11)


@pytest.mark.parametrize(
    ("failures", "expected_s"),
    [(0, 0.1), (1, 0.2), (2, 0.4), (5, 3.2), (6, 5.0), (7, 5.0), (10**6, 5.0)],
    ids=["first", "second", "third", "sixth", "capped", "still capped", "after a million"],
)
def test_pauses_double_up_to_five_seconds(failures: int, expected_s: float) -> None:
    assert pause_s(failures) == pytest.approx(expected_s)


@pytest.mark.parametrize(("jitter", "pause"), [(0.0, 0.2), (0.5, 0.3), (1.0, 0.4)])
def test_a_refusal_is_followed_by_half_a_pause_to_a_whole_one(jitter: float, pause: float) -> None:
    state = Registration(tried=OLD, failures=2)
    after = after_attempt(state, seen(), 200.0, False, jitter)
    assert after.not_before_s == pytest.approx(200.0 + pause)
    assert (after.registered, after.failures) == (None, 3)


def test_a_success_remembers_the_kubelet_that_was_seen_before_the_attempt() -> None:
    state, _ = next_step(FRESH, seen(opened=4))
    after = after_attempt(state, seen(opened=4), 101.0, True, 0.0)
    assert (after.registered, after.registered_s, after.opened) == (OLD, 101.0, 4)
    _, step = next_step(after, seen(now_s=101.0, kubelet=NEW, opened=4))
    assert step is not WAIT  # kubelet was replaced while it answered


# --- a simulated kubelet --------------------------------------------------------------------------


@dataclass(eq=False)
class Client:
    """What kubelet makes of one registration, and when its stream opens and ends."""

    server: int
    opens_s: float
    lasts_s: float
    ends_s: float = inf
    closed: bool = False


@dataclass(eq=False)
class World:
    """Kubelet, the plugin directory and our server, in simulated time.

    Kubelet keeps its clients by the name of the resource: a registration replaces the one before,
    and when a stream ends, whoever has the name then is closed. Source: kubelet 1.36,
    pkg/kubelet/cm/devicemanager/plugin/v1beta1.
    """

    now_s: float = 0.0
    alive: bool = False
    socket: SocketId | None = None
    sockets: int = 0
    # how kubelet is
    refuses: bool = False
    answers_after_s: float = 0.01
    opens_after_s: float = 0.0
    lasts_s: float = inf
    forgets_after_s: float = 0.0
    # what kubelet has
    named: Client | None = None
    pending: list[Client] = field(default_factory=list)
    forgetting_s: list[float] = field(default_factory=list)
    # our server, and who reads from it
    server: int = 0
    listening: bool = False
    open: list[Client] = field(default_factory=list)
    opened: int = 0

    @property
    def serves(self) -> bool:
        """Whether kubelet reads our devices and has us by our name: without, it allocates none."""
        return len(self.open) == 1 and self.named is not None and not self.named.closed

    # kubelet's side

    def kill(self) -> None:
        """SIGKILL: the socket stays behind."""
        self.alive, self.named = False, None
        self.pending, self.open, self.forgetting_s = [], [], []

    def wipe(self) -> None:
        """The first thing that a new kubelet does: all sockets are deleted, ours too."""
        self.kill()
        self.socket, self.listening = None, False

    def appear(self) -> None:
        """A new socket; its inode may be that of the one before the last."""
        self.sockets += 1
        self.alive, self.socket = True, (self.sockets % 2, self.sockets)

    def accept(self) -> bool:
        if not self.alive or self.refuses:
            return False
        self.named = Client(self.server, self.now_s + self.opens_after_s, self.lasts_s)
        self.pending.append(self.named)
        return True

    def open_stream(self, client: Client) -> None:
        """The newer stream ends the older; a server that was stopped takes none."""
        self.pending.remove(client)
        if client.server != self.server:
            self.end_stream(client)
            return
        self.end_streams()
        client.ends_s = self.now_s + client.lasts_s
        self.open, self.opened = [client], self.opened + 1

    def end_streams(self) -> None:
        for client in list(self.open):
            self.end_stream(client)

    def end_stream(self, client: Client) -> None:
        client.closed = True
        self.open = [other for other in self.open if other is not client]
        self.pending = [other for other in self.pending if other is not client]
        if self.alive:
            self.forgetting_s.append(self.now_s + self.forgets_after_s)

    def forget(self, due_s: float) -> None:
        self.forgetting_s.remove(due_s)
        client, self.named = self.named, None
        if client and not client.closed:
            self.end_stream(client)

    def advance(self, until_s: float) -> None:
        """What kubelet does by itself until then, one after the other."""
        while (due := min(self._due(), key=lambda event: event[0])) and due[0] <= until_s:
            self.now_s = max(self.now_s, due[0])
            due[1]()
        self.now_s = max(self.now_s, until_s)

    def _due(self) -> list[tuple[float, Callable[[], None]]]:
        return [
            *((due_s, partial(self.forget, due_s)) for due_s in self.forgetting_s),
            *((client.ends_s, partial(self.end_stream, client)) for client in self.open),
            *((client.opens_s, partial(self.open_stream, client)) for client in self.pending),
            (inf, lambda: None),
        ]

    # our side

    def stop_server(self) -> None:
        self.server += 1
        self.listening = False
        self.end_streams()

    def look(self) -> Seen:
        return Seen(
            now_s=self.now_s,
            kubelet=self.socket,
            listening=self.listening,
            streams=len(self.open),
            opened=self.opened,
        )


@dataclass(eq=False)
class Agent:
    """Looks five times a second, and does what next_step says until that is to wait."""

    world: World
    jitter: Iterator[float]
    state: Registration = FRESH
    attempts_s: list[float] = field(default_factory=list)

    def run(self, duration_s: float) -> None:
        until_s = self.world.now_s + duration_s
        while self.world.now_s < until_s:
            self.look()
            self.world.advance(min(self.world.now_s + 0.2, until_s))

    def look(self) -> None:
        for _ in range(8):
            now = self.world.look()
            self.state, step = next_step(self.state, now)
            if step is WAIT:
                return
            assert now.kubelet is not None
            self.take(step, now)
        raise AssertionError("one step follows the other without end")

    def take(self, step: Step, now: Seen) -> None:
        world = self.world
        if step is REGISTER:
            assert now.listening
            assert not now.streams, "a second registration beside a stream"
            self.attempts_s.append(world.now_s)
            ok = world.accept() and world.answers_after_s <= 12.0
            world.advance(world.now_s + min(world.answers_after_s, 12.0))
            self.state = after_attempt(self.state, now, world.now_s, ok, next(self.jitter))
            return
        assert bool(now.streams) == (step is END_STREAM)
        world.stop_server()
        world.listening = step is LISTEN

    def start_kubelet(self, boot_s: float = 0.0) -> None:
        self.world.wipe()
        self.run(boot_s)
        self.world.appear()


def started(jitter: float = 0.5) -> Agent:
    """An agent beside a kubelet that has just started."""
    agent = Agent(World(), repeat(jitter))
    agent.start_kubelet()
    return agent


# --- what a kubelet may do, and what comes of it --------------------------------------------------

Story = list[tuple[str, float, float]]
"""(what happens, an amount, seconds until the next thing happens), one after the other."""

FACTS = {
    "start": [0.0, 0.1, 0.7, 5.0],
    "kill": [0.0],
    "end streams": [0.0],
    "delete our socket": [0.0],
    "delete its socket": [0.0],
    "refuses": [0.0, 1.0],
    "answers_after_s": [0.01, 0.01, 1.0, 11.0, 13.0],
    "opens_after_s": [0.0, 0.0, 0.1, 0.3, 2.5, inf],
    "lasts_s": [inf, inf, 0.0, 0.3, 5.0, 11.0],
    "forgets_after_s": [0.0, 0.05, 0.4],
}
LATE_S = [3.1, 4.0, 9.0]
DURATIONS = st.sampled_from([0.0, 0.1, 0.5, 2.0, 4.0, 12.0])
JITTERS = st.sampled_from([0.0, 0.5, 1.0])


def stories(facts: dict[str, list[float]]) -> st.SearchStrategy[Story]:
    happening = st.sampled_from([(what, amount) for what, some in facts.items() for amount in some])
    return st.lists(st.builds(lambda a, b: (*a, b), happening, DURATIONS), max_size=12)


def live_through(agent: Agent, story: Story) -> None:
    world = agent.world
    for what, amount, duration_s in story:
        if what == "start":
            agent.start_kubelet(amount)
        elif what == "kill":
            world.kill()
        elif what == "end streams":
            world.end_streams()
        elif what == "delete our socket":
            world.listening = False
        elif what == "delete its socket":
            world.socket = None
        else:
            setattr(world, what, amount)
        agent.run(duration_s)


def stop_faults(agent: Agent) -> None:
    """From now on kubelet does all it should; what it was late with happens now, or never."""
    world = agent.world
    world.refuses, world.answers_after_s = False, 0.01
    world.opens_after_s, world.lasts_s = 0.0, inf
    for client in (*world.pending, *world.open):
        client.lasts_s = client.ends_s = inf
        client.opens_s = inf if client.opens_s == inf else world.now_s
    if not world.alive or world.socket is None:
        agent.start_kubelet(0.1)


def check_recovery(story: Story, jitter: float) -> None:
    agent = started(jitter)
    live_through(agent, story)
    stop_faults(agent)
    agent.run(10.0)
    world = agent.world
    assert world.serves
    done = world.open[0], world.server, len(agent.attempts_s)
    agent.run(60.0)
    assert world.serves
    assert done == (world.open[0], world.server, len(agent.attempts_s))


SIMULATED = settings(max_examples=200, deadline=None)


@SIMULATED
@given(stories(FACTS), JITTERS)
def test_ten_seconds_after_the_last_fault_kubelet_reads_our_devices_for_good(
    story: Story, jitter: float
) -> None:
    event(f"{len(story)} things happened")
    check_recovery(story, jitter)


@SIMULATED
@example([("opens_after_s", 9.0, 0.0), ("start", 0.0, 12.0)], 0.5)
@given(stories(FACTS | {"opens_after_s": [0.0, *LATE_S]}), JITTERS)
def test_so_they_do_after_streams_that_opened_when_nobody_waited_for_them_any_more(
    story: Story, jitter: float
) -> None:
    check_recovery(story, jitter)


@SIMULATED
@given(stories(FACTS), JITTERS, st.sampled_from([0.0, 0.1, 1.0]))
def test_a_new_kubelet_reads_our_devices_within_a_second(
    story: Story, jitter: float, boot_s: float
) -> None:
    agent = started(jitter)
    live_through(agent, story)
    stop_faults(agent)
    agent.start_kubelet(boot_s)
    agent.run(1.0)
    assert agent.world.serves


@SIMULATED
@given(stories(FACTS), JITTERS)
def test_a_dead_kubelet_is_asked_ten_to_thirty_times_a_minute(story: Story, jitter: float) -> None:
    """By hand: half pauses of 0.05, 0.1, … 1.6 s and then 2.5 s end after 29 attempts, 24 in the
    next minute; whole pauses of 5 s and a look each after 11."""
    agent = started(jitter)
    live_through(agent, story)
    stop_faults(agent)
    agent.world.kill()
    agent.attempts_s.clear()
    agent.run(60.0)
    assert 10 <= len(agent.attempts_s) <= 31
    agent.attempts_s.clear()
    agent.run(60.0)
    assert 11 <= len(agent.attempts_s) <= 24


TROUBLES: dict[str, Story] = {
    "refuses": [("refuses", 1.0, 0.0)],
    "never opens a stream": [("opens_after_s", inf, 0.0)],
    "ends each stream at once": [("lasts_s", 0.0, 0.0)],
    "ends each stream at once, and forgets it late": [
        ("lasts_s", 0.0, 0.0),
        ("forgets_after_s", 0.4, 0.0),
    ],
    "ends each stream after a while": [("lasts_s", 0.3, 0.0)],
    "answers too late": [("answers_after_s", 13.0, 0.0)],
}


@pytest.mark.parametrize("jitter", [0.0, 1.0], ids=["least jitter", "most jitter"])
@pytest.mark.parametrize("story", TROUBLES.values(), ids=TROUBLES)
def test_a_kubelet_that_lives_but_does_not_serve_is_asked_less_and_less(
    story: Story, jitter: float
) -> None:
    agent = started(jitter)
    live_through(agent, story)
    agent.run(120.0)
    first, second = (
        [at_s for at_s in agent.attempts_s if from_s <= at_s < from_s + 60.0]
        for from_s in (0.0, 60.0)
    )
    assert len(first) <= 31
    assert 4 <= len(second) <= min(len(first), 24)


def test_a_start_of_both_takes_one_registration() -> None:
    agent = started()
    agent.run(30.0)
    assert agent.world.serves
    assert (agent.world.server, agent.attempts_s) == (1, [0.0])


def test_a_kubelet_that_starts_anew_takes_one_registration_more_on_a_new_socket() -> None:
    agent = started()
    agent.run(30.0)
    agent.start_kubelet(5.0)
    agent.run(30.0)
    assert agent.world.serves
    assert agent.world.server == 2
    assert agent.attempts_s == pytest.approx([0.0, 35.0], abs=0.3)


def test_the_end_of_a_stream_takes_one_registration_more() -> None:
    agent = started()
    live_through(agent, [("forgets_after_s", 0.4, 30.0), ("end streams", 0.0, 30.0)])
    assert agent.world.serves
    assert agent.attempts_s == pytest.approx([0.0, 30.5], abs=0.3)


def test_our_socket_deleted_takes_a_new_one_and_one_registration_more() -> None:
    agent = started()
    live_through(agent, [("forgets_after_s", 0.4, 30.0), ("delete our socket", 0.0, 30.0)])
    assert agent.world.serves
    assert agent.attempts_s == pytest.approx([0.0, 30.5], abs=0.5)
