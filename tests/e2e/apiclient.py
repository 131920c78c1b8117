"""Asking an API server, in plain JSON and with kubectl."""

import json
import subprocess
from pathlib import Path
from typing import Any

import urllib3

from tests.e2e.certificates import Certificate

TESTS = "numalet-e2e"
"""Who asks, as the API server notes it, where a test does, maybe in somebody else's name."""

_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


class ApiError(Exception):
    """The server's answer is not 2xx. `status` is 0 where there is none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class Client:
    """Asks as one user, who has a certificate or a token."""

    def __init__(
        self, url: str, authority: Path, certificate: Certificate | None = None, token: str = ""
    ) -> None:
        self._url = url
        self._headers = {"User-Agent": TESTS}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._pool = urllib3.PoolManager(
            ca_certs=str(authority),
            cert_file=str(certificate.file) if certificate else None,
            key_file=str(certificate.key) if certificate else None,
            retries=False,
            timeout=10,
        )

    def get(self, path: str) -> Any:
        return self.ask("GET", path)

    def status(self, *how: Any) -> int:
        """What became of `ask`: 200 where it was done, else the status of the refusal."""
        try:
            self.ask(*how)
        except ApiError as error:
            return error.status
        return 200

    def find(self, path: str) -> Any:
        """None where there is no such object."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def post(self, path: str, body: Any) -> Any:
        return self.ask("POST", path, body)

    def patch(self, path: str, body: Any) -> Any:
        """Merges `body` into what is there."""
        return self.ask("PATCH", path, body, _MERGE_PATCH)

    def delete(self, path: str) -> None:
        """Nothing happens where there is no such object."""
        try:
            self.ask("DELETE", path)
        except ApiError as error:
            if error.status != 404:
                raise

    def ask(self, method: str, path: str, body: Any = None, content_type: str = _JSON) -> Any:
        """What a JSON answer says, else its text. Raises ApiError."""
        try:
            answer = self._pool.request(
                method,
                self._url + path,
                body=None if body is None else json.dumps(body),
                headers={**self._headers, "Content-Type": content_type},
            )
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(0, str(error)) from error
        said = json.loads(answer.data) if _is_json(answer) else answer.data.decode()
        if not 200 <= answer.status < 300:
            raise ApiError(answer.status, said["message"] if isinstance(said, dict) else said)
        return said


def _is_json(answer: urllib3.BaseHTTPResponse) -> bool:
    return answer.headers.get("Content-Type", "").startswith(_JSON)


class Kubectl:
    """The program, as one user."""

    def __init__(self, binary: Path, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self._command: list[str | Path] = [binary, f"--kubeconfig={kubeconfig}"]

    def __call__(self, *words: str | Path) -> str:
        """What it prints. Raises AssertionError with what it says of an error."""
        command = [*self._command, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert not done.returncode, f"kubectl {' '.join(map(str, words))}: {done.stderr}"
        return done.stdout
