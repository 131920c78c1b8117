"""What people see in a cluster: the CRD with its columns, alerts and the dashboard, held against
what the agent writes."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest
from prometheus_client.metrics import MetricWrapperBase

from agent.core.bitmap import Bitmap
from agent.core.layout import lay_out
from agent.core.ledger import Ledger
from agent.core.report import GROUP, PLURAL, VERSION, About, to_nrt
from agent.edge.status import Metrics
from tests import machines
from tests.core.machines import described
from tests.manifests import BASE, COMPONENTS, FOLDER, Object, objects_in, one_of

MACHINES: Final = sorted(file.stem for file in machines.FOLDER.glob("*.toml"))
CRD: Final = one_of(objects_in(FOLDER / "crd"), "CustomResourceDefinition")
VERSIONS: Final[Mapping[str, Object]] = {one["name"]: one for one in CRD["spec"]["versions"]}
MONITORING: Final = COMPONENTS / "monitoring"


# --- the CRD --------------------------------------------------------------------------------------


def _report(name: str) -> Object:
    ledger = Ledger(layout=lay_out(described(name)), reserved=Bitmap([0]))
    return to_nrt(ledger, About(node="node-1", pinning="nri"))


def test_the_crd_is_the_one_that_all_share() -> None:
    spec = CRD["spec"]
    assert CRD["metadata"]["name"] == f"{PLURAL}.{GROUP}"
    assert "api-approved.kubernetes.io" in CRD["metadata"]["annotations"]
    assert (spec["group"], spec["scope"]) == (GROUP, "Cluster")
    assert spec["names"] == {
        "kind": "NodeResourceTopology",
        "listKind": "NodeResourceTopologyList",
        "plural": PLURAL,
        "singular": "noderesourcetopology",
        "shortNames": ["node-res-topo"],
    }
    served = {name: (one["served"], one["storage"]) for name, one in VERSIONS.items()}
    assert served == {"v1alpha1": (True, False), VERSION: (True, True)}
    required = {
        name: one["schema"]["openAPIV3Schema"]["required"] for name, one in VERSIONS.items()
    }
    assert required == {"v1alpha1": ["topologyPolicies", "zones"], VERSION: ["zones"]}


def _misfits(value: Any, schema: Object, path: str) -> Iterator[str]:
    """Where the value is not what this part of OpenAPI's schemas says, or has what it does not."""
    types = [one["type"] for one in schema.get("anyOf", (schema,))]
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    if not any(type(value) is kinds[name] for name in types):
        yield f"{path}: {value!r} is no {' or '.join(types)}"
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _misfits(item, schema["items"], f"{path}[{place}]")
    elif isinstance(value, dict) and (properties := schema.get("properties")) is not None:
        yield from (
            f"{path}: has no {name}" for name in schema.get("required", ()) if name not in value
        )
        yield from (f"{path}: has {name}, which is lost" for name in set(value) - set(properties))
        for name in set(value) & set(properties):
            yield from _misfits(value[name], properties[name], f"{path}.{name}")
    elif isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{path}: {value!r} is no quantity"


@pytest.mark.parametrize("name", MACHINES)
def test_the_report_of_every_machine_fits_the_crd(name: str) -> None:
    assert not list(_misfits(_report(name), VERSIONS[VERSION]["schema"]["openAPIV3Schema"], ""))


def test_the_schema_would_find_a_report_that_does_not_fit() -> None:
    report = _report("a800x8")
    report["zones"][0]["resources"][0] = {
        "name": 1,
        "capacity": "much",
        "allocatable": 1,
        "new": "",
    }
    report["zones"][1].pop("type")
    found = set(_misfits(report, VERSIONS[VERSION]["schema"]["openAPIV3Schema"], ""))
    resource = ".zones[0].resources[0]"
    assert found == {
        f"{resource}: has no available",
        f"{resource}: has new, which is lost",
        f"{resource}.name: 1 is no string",
        f"{resource}.capacity: 'much' is no quantity",
        ".zones[1]: has no type",
    }


def test_every_column_shows_an_attribute_that_the_report_has() -> None:
    *columns, age = (one["jsonPath"] for one in VERSIONS[VERSION]["additionalPrinterColumns"])
    written = {
        f'.attributes[?(@.name=="{one["name"]}")].value' for one in _report("a800x8")["attributes"]
    }
    assert set(columns) <= written
    assert age == ".metadata.creationTimestamp"


# --- metrics --------------------------------------------------------------------------------------


def _metrics() -> dict[str, set[str]]:
    """Labels by the name of the series, as Prometheus has them."""
    metrics = Metrics()
    found = {one.name: set(one.labels) for m in metrics.registry.collect() for one in m.samples}
    found |= {family.name: set(family._labelnames) for family in metrics.collect()}
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    for one in vars(metrics).values():
        if isinstance(one, MetricWrapperBase):
            (family,) = one.describe()
            for end in ends.get(family.type, ("",)):
                labels = {"le"} if end == "_bucket" else set()
                found[family.name + end] = labels | set(one._labelnames)
    return found | {"up": set()}


METRICS: Final = _metrics()
ADDED: Final = {"instance", "job"}
"""Labels that scraping adds."""
_WORDS: Final = {"sum", "count", "unless", "or"}
_USE: Final = re.compile(r"([a-z_][a-z0-9_:]*)\s*(?:\{(.*?)\})?(?![\w(])")


def _uses(expression: str) -> Iterator[tuple[str, set[str]]]:
    """(series, labels that are matched), and the labels of each `by` with all series beside it."""
    bare = re.sub(r"by \([^)]*\)", "", expression)
    grouped = {
        label.strip()
        for group in re.findall(r"by \(([^)]*)\)", expression)
        for label in group.split(",")
    }
    for name, matchers in _USE.findall(re.sub(r"\[[^\]]*\]", "", bare)):
        if name not in _WORDS:
            yield name, grouped | set(re.findall(r"(\w+)\s*=", matchers))


def _problems(expression: str) -> list[str]:
    uses = list(_uses(expression))
    unknown = [f"there is no {name}" for name, _ in uses if name not in METRICS]
    strange = [
        f"{name} has no {label}"
        for name, labels in uses
        for label in labels - ADDED - METRICS.get(name, labels)
    ]
    return unknown + strange if uses else [f"{expression} uses nothing"]


(_GROUP,) = one_of(objects_in(MONITORING), "PrometheusRule")["spec"]["groups"]
RULES: Final[list[Object]] = _GROUP["rules"]
DASHBOARD: Final[Object] = json.loads((MONITORING / "dashboard.json").read_text())
QUERIES: Final[list[str]] = [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_about_a_metric_and_says_what_to_do(rule: Object) -> None:
    assert _problems(rule["expr"]) == []
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "runbook"}
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    known = set().union(*(METRICS[name] | ADDED for name, _ in _uses(rule["expr"])))
    assert "instance" in shown <= known
    assert rule["annotations"]["runbook"].endswith(".")


@pytest.mark.parametrize("query", QUERIES)
def test_a_panel_shows_a_metric(query: str) -> None:
    assert _problems(query) == []


def test_every_metric_is_shown_or_alerts() -> None:
    queries = [*QUERIES, *(rule["expr"] for rule in RULES)]
    used = {re.sub("_bucket$", "", name) for query in queries for name, _ in _uses(query)}
    ours = {re.sub("_(bucket|sum|count)$", "", name) for name in METRICS if "numalet" in name}
    assert ours - used == set()


def test_the_checks_would_find_what_does_not_exist() -> None:
    assert _problems('sum by (instance, gpu) (rate(numalet_nothing_total{x="y"}[5m]))') == [
        "there is no numalet_nothing_total"
    ]
    assert _problems("sum by (gpu) (numalet_driver_up)") == ["numalet_driver_up has no gpu"]
    assert _problems('numalet_gpus{card="1"} > 0') == ["numalet_gpus has no card"]


def test_panels_do_not_lie_over_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_pods_are_scraped_at_the_port_that_they_have() -> None:
    monitor = one_of(objects_in(MONITORING), "PodMonitor")["spec"]
    template = one_of(objects_in(BASE), "DaemonSet")["spec"]["template"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["metadata"]["labels"][monitor["jobLabel"]] == "numalet"
    assert endpoint["port"] == template["spec"]["containers"][0]["ports"][0]["name"]
    assert endpoint["path"] == "/metrics"
