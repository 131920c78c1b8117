"""When to listen and register: a table of situations, and a simulated kubelet that fails in every
way that a real one is known to. Expected times are worked out by hand from the docstrings."""

from collections.abc import Iterator
from dataclasses import dataclass, field
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
    assert step is REGISTER  # kubelet was replaced while it answered


# --- a simulated kubelet --------------------------------------------------------------------------


@dataclass(eq=False)
class Client:
    """What kubelet makes of one registration; `opens_s` is when it opens its stream."""

    server: int
    opens_s: float
    closed: bool = False


@dataclass(eq=False)
class World:
    """Kubelet, the plugin directory and our server, in simulated time.

    Kubelet keeps clients by resource name: a registration replaces the client, and when any stream
    ends, whoever has the name then is closed. Source: kubelet 1.36, section 1.3 of its facts.
    """

    now_s: float = 0.0
    # kubelet
    alive: bool = False
    socket: SocketId | None = None
    refuses: bool = False
    opens_after_s: float = 0.0
    forgets_after_s: float = 0.0
    answers_after_s: float = 0.01
    named: Client | None = None
    pending: list[Client] = field(default_factory=list)
    forgetting_s: list[float] = field(default_factory=list)
    # ours
    server: int = 0
    listening: bool = False
    open: list[Client] = field(default_factory=list)
    opened: int = 0
    # what happened
    sockets: int = 0
    attempts_s: list[float] = field(default_factory=list)
    endings: int = 0

    # kubelet's side

    def kill(self) -> None:
        """SIGKILL: the socket stays behind."""
        self.alive, self.named = False, None
        self.pending, self.open, self.forgetting_s = [], [], []

    def start(self, boot_s: float) -> Iterator[float]:
        """Deletes all sockets, ours too, and listens a while later."""
        self.kill()
        self.socket, self.listening = None, False
        yield boot_s
        self.sockets += 1
        self.alive, self.socket = True, (self.sockets % 2, self.sockets)

    def accept(self) -> bool:
        if not self.alive or self.refuses:
            return False
        self.named = Client(server=self.server, opens_s=self.now_s + self.opens_after_s)
        self.pending.append(self.named)
        return True

    def break_streams(self) -> None:
        for client in list(self.open):
            self.end(client)

    def end(self, client: Client) -> None:
        client.closed = True
        self.open = [other for other in self.open if other is not client]
        self.pending = [other for other in self.pending if other is not client]
        if self.alive:
            self.forgetting_s.append(self.now_s + self.forgets_after_s)

    def forget(self) -> None:
        client, self.named = self.named, None
        if client and not client.closed:
            self.end(client)

    # our side

    def admit(self, client: Client) -> None:
        """A newer stream ends the older; a server that was stopped has none."""
        self.pending.remove(client)
        if client.server != self.server:
            self.end(client)
            return
        self.break_streams()
        self.open, self.opened = [client], self.opened + 1

    def stop_server(self) -> None:
        self.endings += 1
        self.server += 1
        self.listening = False
        self.break_streams()

    def look(self) -> Seen:
        return Seen(
            now_s=self.now_s,
            kubelet=self.socket,
            listening=self.listening,
            streams=len(self.open),
            opened=self.opened,
        )

    # time

    def advance(self, until_s: float) -> None:
        """What kubelet does by itself until then, in order."""
        while True:
            opening = min(self.pending, key=lambda client: client.opens_s, default=None)
            opens_s = opening.opens_s if opening else inf
            forgets_s = min(self.forgetting_s, default=inf)
            if min(opens_s, forgets_s) > until_s:
                break
            self.now_s = max(self.now_s, min(opens_s, forgets_s))
            if forgets_s <= opens_s:
                self.forgetting_s.remove(forgets_s)
                self.forget()
            else:
                assert opening
                self.admit(opening)
        self.now_s = max(self.now_s, until_s)

    @property
    def serves(self) -> bool:
        """Whether kubelet has us by our name, and reads our devices."""
        return len(self.open) == 1 and self.named is self.open[0]


@dataclass(eq=False)
class Agent:
    """Looks five times a second, and does what next_step says until that is to wait."""

    world: World
    jitters: Iterator[float]
    state: Registration = FRESH

    def run(self, duration_s: float) -> None:
        until_s = self.world.now_s + duration_s
        while self.world.now_s < until_s:
            self.act()
            self.world.advance(min(self.world.now_s + 0.2, until_s))

    def act(self) -> None:
        for _ in range(5):
            now = self.world.look()
            self.state, step = next_step(self.state, now)
            if step is WAIT:
                return
            assert now.kubelet is not None
            self.take(step, now)
        raise AssertionError("there is no end of steps at one time")

    def take(self, step: Step, now: Seen) -> None:
        world = self.world
        if step is LISTEN:
            assert not now.streams
            world.stop_server()
            world.listening = True
        elif step is END_STREAM:
            assert now.streams
            world.stop_server()
        else:
            assert now.listening
            assert not now.streams, "a second registration beside a stream"
            world.attempts_s.append(world.now_s)
            ok = world.accept()
            world.advance(world.now_s + min(world.answers_after_s, 12.0))
            ok = ok and world.answers_after_s <= 12.0
            self.state = after_attempt(self.state, now, world.now_s, ok, next(self.jitters))


DELAYS = [0.0, 0.0, 0.1, 0.3, 2.9, 3.1, 4.0, 9.0, inf]
FAULTS = st.one_of(
    st.just(("kill", 0.0)),
    st.tuples(st.just("start"), st.sampled_from([0.0, 0.1, 0.7, 5.0])),
    st.just(("break", 0.0)),
    st.just(("delete our socket", 0.0)),
    st.just(("delete kubelet's socket", 0.0)),
    st.tuples(st.just("refuse"), st.sampled_from([0.0, 1.0])),
    st.tuples(st.just("open after"), st.sampled_from(DELAYS)),
    st.tuples(st.just("forget after"), st.sampled_from([0.0, 0.05, 0.4])),
    st.tuples(st.just("answer after"), st.sampled_from([0.01, 0.01, 1.0, 11.0, 13.0])),
)
HISTORIES = st.lists(st.tuples(FAULTS, st.sampled_from([0.0, 0.1, 0.5, 2.0, 4.0, 12.0])), max_size=12)
JITTERS = st.sampled_from([0.0, 0.5, 1.0])


def live_through(agent: Agent, history: list[tuple[tuple[str, float], float]]) -> None:
    world = agent.world
    for (fault, amount), duration_s in history:
        if fault == "kill":
            world.kill()
        elif fault == "start":
            for boot_s in world.start(amount):
                agent.run(boot_s)
        elif fault == "break":
            world.break_streams()
        elif fault == "delete our socket":
            world.listening = False
        elif fault == "delete kubelet's socket":
            world.socket = None
        elif fault == "refuse":
            world.refuses = bool(amount)
        elif fault == "open after":
            world.opens_after_s = amount
        elif fault == "forget after":
            world.forgets_after_s = amount
        else:
            world.answers_after_s = amount
        agent.run(duration_s)


def stop_faults(agent: Agent) -> None:
    world = agent.world
    world.refuses, world.opens_after_s, world.answers_after_s = False, 0.0, 0.01
    for client in world.pending:
        if client.opens_s != inf:
            client.opens_s = world.now_s
    if not world.alive or world.socket is None:
        for boot_s in world.start(0.1):
            agent.run(boot_s)


def forever(jitter: float) -> Iterator[float]:
    while True:
        yield jitter


@settings(max_examples=2000, deadline=None)
@given(HISTORIES, JITTERS)
def test_ten_seconds_after_the_last_fault_kubelet_reads_our_devices_for_good(
    history: list[tuple[tuple[str, float], float]], jitter: float
) -> None:
    agent = Agent(World(), forever(jitter))
    live_through(agent, history)
    stop_faults(agent)
    agent.run(10.0)
    world = agent.world
    assert world.serves, (world, agent.state)
    done = world.open[0], len(world.attempts_s), world.endings
    agent.run(60.0)
    assert world.serves
    assert done == (world.open[0], len(world.attempts_s), world.endings)
