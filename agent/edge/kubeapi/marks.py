"""The GPUs that an administrator marked as faulty in ACK's ConfigMaps."""

from collections.abc import Callable

import yaml

from agent.core import ack
from agent.core.health import MAX_MARKS_LENGTH, FaultMarks
from agent.core.strict_json import Object, printable
from agent.edge.kubeapi.client import Api
from agent.edge.kubeapi.objects import read_config_map


def read_marks(api: Api, node: str) -> tuple[dict[str, FaultMarks], str]:
    """The marks for this node by the name of their ConfigMap, and a sentence about those that
    cannot be understood, which are left out.

    Raises KubeApiError where a ConfigMap cannot be read; one that does not exist marks nothing.
    """
    kinds: tuple[tuple[str, Callable[[Object], FaultMarks]], ...] = (
        (ack.device_status_name(node), _parse_device_status),
        (ack.unhealthy_name(node), ack.parse_unhealthy_gpus),
    )
    found, problems = {}, []
    for name, parse in kinds:
        config_map = read_config_map(api, ack.NAMESPACE, name)
        try:
            found[name] = parse(config_map) if config_map else FaultMarks()
        except ValueError as error:
            problems.append(f"ConfigMap {ack.NAMESPACE}/{name}: {error}")
    return found, "; ".join(problems)


def _parse_device_status(config_map: Object) -> FaultMarks:
    """Raises ValueError."""
    data = config_map.get("data")
    text = data.get("devices") if isinstance(data, dict) else None
    if not isinstance(text, str):
        raise ValueError("it has no devices")
    if len(text) > MAX_MARKS_LENGTH:
        raise ValueError(f"its devices are longer than {MAX_MARKS_LENGTH:,} characters")
    try:
        devices = yaml.safe_load(text)
    except RecursionError:
        raise ValueError("its devices are YAML that is nested too deeply") from None
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, ValueError) as error:
        problem = getattr(error, "problem", None) or str(error)  # values are made of any text
        raise ValueError(f"its devices are not YAML: {printable(problem, 120)}") from None
    return ack.parse_device_status(devices)
