"""One call of kubelet's: parsed, answered, timed.

Requests are parsed here and not by gRPC, which for ever keeps the calls that it cannot parse.
"""

import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message


class RefusedError(Exception):
    """Kubelet asked for what cannot be; the text is one sentence."""


def answer_call(
    method: str,
    kind: type[Message],
    answer: Callable[[Any], Any],
    on_rpc: Callable[[str, float, str], None],
) -> Callable[[bytes, grpc.ServicerContext], Any]:
    """A handler of calls whose requests are of that kind. Tells how long each took and its code."""

    def handle(body: bytes, context: grpc.ServicerContext) -> Any:
        start, code = time.perf_counter(), grpc.StatusCode.UNKNOWN
        try:
            response = answer(_parse(kind, body))
            code = grpc.StatusCode.OK
        except RefusedError as refused:
            code = grpc.StatusCode.INVALID_ARGUMENT
            context.abort(code, str(refused))
        finally:
            on_rpc(method, time.perf_counter() - start, code.name)
        return response

    return handle


def _parse(kind: type[Message], body: bytes) -> Message:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise RefusedError("the request is no message of this API") from error
