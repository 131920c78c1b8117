"""The pods of this node as kubelet has them, with what they ask and which containers they have.

Source: kubelet's GET /pods, a v1.PodList.
"""

import ipaddress
import json
import ssl
import urllib.error
import urllib.request
from typing import Any, Final
from urllib.parse import urlsplit

from agent.core.strict_json import printable
from agent.errors import KubeletError

_LARGEST_ANSWER: Final = 32 << 20


def list_pods(url: str, timeout_s: float = 2.0) -> tuple[dict[str, Any], ...]:
    """All pods that kubelet at `url` knows, static ones too.

    A certificate is looked at only where `url` is not of this host: kubelet signs its own.

    Raises:
        KubeletError: there is no answer, or it is no list of pods.
    """
    where = f"{url.rstrip('/')}/pods"
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_context(url))
    )
    try:
        with opener.open(where, timeout=timeout_s) as answer:
            data = answer.read(_LARGEST_ANSWER + 1)
    except urllib.error.HTTPError as error:
        raise KubeletError(f"{where}: kubelet answers {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise KubeletError(f"{where}: no answer: {printable(str(reason), 200)}") from error
    if len(data) > _LARGEST_ANSWER:
        raise KubeletError(f"{where}: the answer is larger than {_LARGEST_ANSWER >> 20} MiB")
    return _parse(where, data)


def _context(url: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if _is_loopback(urlsplit(url).hostname or ""):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parse(where: str, data: bytes) -> tuple[dict[str, Any], ...]:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise KubeletError(f"{where}: the answer is not JSON: {error}") from error
    items = answer.get("items") if isinstance(answer, dict) else None
    if not isinstance(items, list | None):
        raise KubeletError(f"{where}: the answer is no list of pods")
    return tuple(item for item in items or () if isinstance(item, dict))
