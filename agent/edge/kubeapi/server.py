"""Where the API server is, and what proves either side: a token, and authorities to trust."""

import ipaddress
import os
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from agent.core.strict_json import printable

_TOKEN_S: Final = 60.0
"""How long a token is used before its file is read anew."""
_LARGEST_TOKEN: Final = 64 << 10

_FileId = tuple[int, int, int]
"""Device, inode and mtime in nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An API server, and the folder with `token` and `ca.crt`, which may lack either, or be empty
    where there is none."""

    url: str
    folder: str


def find_server(kube_api: str, folder: str) -> Server | None:
    """The API server of this URL; of the environment for an empty one, None if it has none.

    Source: Kubernetes sets KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT in every container.
    """
    if kube_api:
        return Server(url=kube_api.rstrip("/"), folder=folder)
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "") or "443"
    if not host:
        return None
    return Server(url=f"https://{f'[{host}]' if ':' in host else host}:{port}", folder=folder)


class Credentials:
    """The folder's token and authorities, as they are now: both rotate. For any thread."""

    def __init__(self, server: Server) -> None:
        self._token_file = _join(server.folder, "token")
        self._trust_file = _join(server.folder, "ca.crt")
        self._may_send = _keeps_secrets(server.url)
        self._lock = threading.Lock()
        self._token = ""
        self._token_by_s = 0.0
        self._trust: ssl.SSLContext | None = None
        self._trusted: _FileId | None = None

    def token(self) -> str:
        """Empty where there is none, or it would go over the network in clear.

        Raises OSError, or ValueError with a sentence.
        """
        with self._lock:
            if self._may_send and time.monotonic() >= self._token_by_s:
                self._token = _read_token(self._token_file)
                self._token_by_s = time.monotonic() + _TOKEN_S
            return self._token

    def trust(self) -> ssl.SSLContext:
        """The same context as before, unless the file of authorities changed.

        Raises OSError, or ValueError with a sentence.
        """
        with self._lock:
            found = _identify(self._trust_file)
            if self._trust is None or found != self._trusted:
                self._trust = _read_trust(self._trust_file if found else None)
                self._trusted = found
            return self._trust

    def doubt_token(self) -> None:
        """It was refused: the file is read anew at the next use."""
        with self._lock:
            self._token_by_s = 0.0

    def doubt_trust(self) -> None:
        """The other side could not be trusted: the file is read anew at the next use."""
        with self._lock:
            self._trust = None


def check_url(url: str) -> None:
    """Raises ValueError with a sentence unless the URL can be an API server's."""
    try:
        address = urlsplit(url)
        is_one = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:  # a port that is none
        is_one = False
    if not is_one:
        raise ValueError("it is no URL like https://10.0.0.1:6443")


def _keeps_secrets(url: str) -> bool:
    """Whether nobody on the network can read what goes to this URL."""
    try:
        address = urlsplit(url)
        return address.scheme == "https" or _is_loopback(address.hostname or "")
    except ValueError:
        return False


def _join(folder: str, name: str) -> str:
    return os.path.join(folder, name) if folder else ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_token(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            token = file.read(_LARGEST_TOKEN + 1).strip()
    except FileNotFoundError:
        return ""
    is_one_word = token.isprintable() and token.isascii() and " " not in token and token
    if not is_one_word or len(token) > _LARGEST_TOKEN:
        raise ValueError(f"the file {printable(path, 400)} has no token")
    return token


def _identify(path: str) -> _FileId | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _read_trust(path: str | None) -> ssl.SSLContext:
    """Trusts these authorities, those of the system for None.

    Python 3.13 asks more of certificates than Kubernetes' own authorities have, such as an
    authority key identifier; that is switched off.
    """
    try:
        context = ssl.create_default_context(cafile=path)
    except OSError as error:
        why = "" if isinstance(error, ssl.SSLError) else f": {error.strerror}"
        raise ValueError(
            f"the file {printable(path or '', 400)} has no certificates{why}"
        ) from None
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
