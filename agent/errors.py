"""Every error that numalet raises on purpose.

AgentError
├── ConfigError            an option or a file given by the user that cannot be meant
├── DiscoveryError         the machine cannot be read, or what it says contradicts itself
├── KubeletError           kubelet cannot be reached, or what it answers makes no sense
├── KubeApiError           the API server cannot be reached, or refuses
├── ContainerRuntimeError  the container runtime cannot be reached, or breaks its protocol
└── PinError               a cpuset cannot be read or written

Each edge translates foreign exceptions in one place, with the cause chained. The text is
one sentence for people that names the path or the peer. Core raises only ValueError.
"""


class AgentError(Exception):
    """The root: what a caller may catch to go on with the rest."""


class ConfigError(AgentError):
    """An option or a file given by the user that cannot be meant."""


class DiscoveryError(AgentError):
    """The machine cannot be read, or what it says contradicts itself."""


class KubeletError(AgentError):
    """Kubelet cannot be reached, or what it answers makes no sense."""


class KubeApiError(AgentError):
    """The API server cannot be reached, or refuses; `status` is HTTP's, None without an answer."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


class ContainerRuntimeError(AgentError):
    """The container runtime cannot be reached, or breaks its protocol."""


class PinError(AgentError):
    """A cpuset cannot be read or written."""
