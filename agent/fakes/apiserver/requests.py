"""What a client asks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(slots=True, kw_only=True)
class Request:
    """As it came; `status` is None until it is answered. `connection` tells connections apart.

    Headers' names are written Like-This, however they came.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    raw: bytes
    connection: int
    at_s: float
    user: str | None = None
    status: int | None = None

    @property
    def body(self) -> Any:
        """Parsed; None for none."""
        try:
            return json.loads(self.raw) if self.raw else None
        except ValueError:
            return yaml.safe_load(self.raw)

    @property
    def token(self) -> str | None:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else None

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0].strip()

    @property
    def is_watch(self) -> bool:
        return self.method == "GET" and self.query.get("watch") in ("true", "1")

    @property
    def writes(self) -> bool:
        return self.method not in ("GET", "HEAD") and self.path != REVIEW
