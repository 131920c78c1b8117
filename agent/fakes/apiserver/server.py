"""The server's life, and what a test does to it."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.fakes.apiserver.answering import answer
from agent.fakes.apiserver.cluster import Cluster
from agent.fakes.apiserver.faults import Answer, Fault
from agent.fakes.apiserver.fields import Object
from agent.fakes.apiserver.http import Listener
from agent.fakes.apiserver.requests import Request
from agent.fakes.apiserver.watching import watch
from agent.fakes.certificates import Certificate


@dataclass(slots=True)
class _Planned:
    fault: Fault
    times: int | None
    concerns: Callable[[Request], bool]


class FakeApiServer(Cluster):
    """A context manager that starts and stops it; it keeps port and objects when started again.

    requests      all that were asked, in order
    connections   how many were made, as far as a request
    watches       how many are open
    tls_failures  why handshakes failed
    crashes       tracebacks of this server's own bugs, which fail the test at the end
    """

    def __init__(self, certificate: Certificate | None = None) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.tls_failures: list[str] = []
        self.crashes: list[str] = []
        self.connections = self.watches = 0
        self.port = 0
        self.certificate = certificate
        self._planned: list[_Planned] = []
        self._ends = 0
        self._listener: Listener | None = None
        self._sockets: set[socket.socket] = set()
        self._healed = threading.Event()

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        assert not self.crashes, "\n".join(self.crashes)

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._listener is not None

    def start(self) -> None:
        assert not self._listener
        self._healed = threading.Event()
        self._listener = Listener(self, self.port)
        self.port = self._listener.server_port
        threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def stop(self) -> None:
        """As when it is killed: every connection breaks. Objects stay."""
        listener, self._listener = self._listener, None
        if listener:
            listener.shutdown()
            listener.server_close()
        self._healed.set()
        self.drop_connections()
        self.wait_for(lambda: not self.open)

    def restart(self) -> None:
        self.stop()
        self.start()

    def rotate(self, certificate: Certificate) -> None:
        """For connections from now on."""
        self.certificate = certificate

    def drop_connections(self) -> None:
        """As when a load balancer forgets them."""
        with self.store.changed:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
            self.store.changed.notify_all()

    def end_watches(self) -> None:
        """In order, as at the end of their time."""
        with self.store.changed:
            self._ends += 1
            self.store.changed.notify_all()

    # --- disturbing -------------------------------------------------------------------------------

    def fail(
        self,
        fault: Fault,
        times: int | None = None,
        concerns: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        """The next so many requests of this kind; for ever without a number. First come, first."""
        with self.store.changed:
            self._planned.append(_Planned(fault, times, concerns))

    def heal(self) -> None:
        """No more faults; what hangs or is slow ends."""
        with self.store.changed:
            self._planned.clear()
            healed, self._healed = self._healed, threading.Event()
            healed.set()

    # --- what a test sees -------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """Connections, as they are now."""
        return len(self._sockets)

    @property
    def writes(self) -> list[Request]:
        """Requests that would change something, refused ones too."""
        return [request for request in list(self.requests) if request.writes]

    def wait_for(self, predicate: Callable[[], object], timeout_s: float = 20.0) -> None:
        """Until `predicate()`, which may be about this server or about anything else.

        Raises:
            TimeoutError: it did not come true; the text says what was asked last.
        """
        deadline = time.monotonic() + timeout_s
        while not predicate():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so within {timeout_s:g} s: {self}")
            with self.store.changed:
                self.store.changed.wait(0.01)

    def __str__(self) -> str:
        last = [f"{one.method} {one.path} {one.query} {one.status}" for one in self.requests[-10:]]
        return (
            f"running={self.running} open={self.open} watches={self.watches} "
            f"requests={len(self.requests)} tls_failures={self.tls_failures[-3:]} last={last}"
        )

    # --- what connections ask of it ---------------------------------------------------------------

    def opened(self, connection: socket.socket) -> bool:
        """False if it comes too late."""
        with self.store.changed:
            self._sockets.add(connection)
            return self.running

    def closed(self, *connections: socket.socket) -> None:
        with self.store.changed:
            self._sockets.difference_update(connections)
            self.store.changed.notify_all()

    def count_connection(self) -> int:
        with self.store.changed:
            self.connections += 1
            return self.connections

    @contextlib.contextmanager
    def counted_watch(self) -> Iterator[None]:
        self._count_watch(1)
        try:
            yield
        finally:
            self._count_watch(-1)

    def _count_watch(self, more: int) -> None:
        with self.store.changed:
            self.watches += more
            self.store.changed.notify_all()

    def note(self, request: Request) -> Fault | None:
        """Remembers a request; the fault that it meets."""
        with self.store.changed:
            self.requests.append(request)
            self.store.changed.notify_all()
            for planned in self._planned:
                if planned.times != 0 and planned.concerns(request):
                    planned.times = None if planned.times is None else planned.times - 1
                    return planned.fault
            return None

    def answer(self, request: Request) -> Answer:
        return answer(self, request)

    def watch(self, request: Request) -> Iterator[list[Object]] | None:
        ends = self._ends
        return watch(self, request, lambda: self.running and self._ends == ends)

    @property
    def healed(self) -> threading.Event:
        """Set when the faults of now end."""
        return self._healed


def lay_out_account(folder: Path, token: str | None, authority: Certificate | None = None) -> None:
    """A service account's folder, or what changes in it; a new file takes the place of the old one,
    as kubelet does it."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"token": token, "ca.crt": authority.chain.read_text() if authority else None}
    for name, text in files.items():
        if text is not None:
            (folder / f".{name}").write_text(text)
            (folder / f".{name}").replace(folder / name)
