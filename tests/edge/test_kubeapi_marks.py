"""The administrator's marks of faulty GPUs, in ConfigMaps of every shape."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.edge.kubeapi import Api, Server, read_marks
from agent.errors import KubeApiError
from agent.fakes.apiserver import FakeApiServer, Rule, User, cut, refuse, say

NODE = "node-1"
STATUS, UNHEALTHY = f"{NODE}-device-status", f"unhealthy-gpu-{NODE}"
NAMESPACE = "kube-system"


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        yield server


@pytest.fixture
def server(fake: FakeApiServer) -> FakeApiServer:
    """With neither ConfigMap."""
    fake.heal()
    fake.users.clear()
    for name in (STATUS, UNHEALTHY):
        if fake.get("configmaps", name, NAMESPACE):
            fake.remove("configmaps", name, NAMESPACE)
    return fake


@pytest.fixture
def read(server: FakeApiServer, tmp_path: Path) -> Iterator[Callable[[], tuple[set[int], str]]]:
    """Reads the indices that are marked, and what cannot be understood."""
    (tmp_path / "token").write_text("token")
    api = Api(Server(url=server.url, folder=str(tmp_path)))

    def read() -> tuple[set[int], str]:
        found, problem = read_marks(api, NODE)
        assert found.keys() <= {STATUS, UNHEALTHY}
        assert not any(marks.uuids for marks in found.values())
        assert (found.keys() < {STATUS, UNHEALTHY}) is bool(problem)
        assert problem.isprintable()
        assert len(problem) < 1000
        return {index for marks in found.values() for index in marks.indices}, problem

    yield read
    api.close()


Read = Callable[[], tuple[set[int], str]]


def lay(server: FakeApiServer, name: str, data: Any, **more: Any) -> None:
    metadata = {"name": name, "namespace": NAMESPACE}
    server.put("configmaps", {"metadata": metadata, "data": data, **more})


def status(*healthy: bool, kind: str = "gpu") -> str:
    """As ACK's document writes it."""
    return "".join(
        f"- deviceId: {number}\n  deviceType: {kind}\n  healthy: {str(one).lower()}\n"
        for number, one in enumerate(healthy)
    )


# --- what is understood ---------------------------------------------------------------------------


def test_without_a_config_map_nothing_is_marked(read: Read) -> None:
    assert read() == (set(), "")


@pytest.mark.parametrize(
    ("devices", "marked"),
    [
        pytest.param(status(True, False, True, False), {1, 3}, id="as ACK documents it"),
        pytest.param(status(True, True), set(), id="all are healthy"),
        pytest.param(status(False, kind="npu"), set(), id="another kind of device"),
        pytest.param("- {deviceId: '2', deviceType: gpu, healthy: false}", {2}, id="a text"),
        pytest.param(
            '[{"deviceId": 1, "deviceType": "gpu", "healthy": false}]',
            {1},
            id="JSON",
        ),
        pytest.param(status(False) + status(False), {0}, id="said twice"),
        pytest.param("- {deviceId: 1, deviceType: gpu, healthy: no}", {1}, id="YAML's no"),
        pytest.param("", set(), id="empty"),
        pytest.param("# nothing\n", set(), id="a comment"),
        pytest.param("[]", set(), id="an empty list"),
        pytest.param("null", set(), id="null"),
        pytest.param(status(False) + "\n  reason: ECC\n  since: 2026-11-30\n", {0}, id="more said"),
    ],
)
def test_the_marks_of_device_status(
    server: FakeApiServer, read: Read, devices: str, marked: set[int]
) -> None:
    lay(server, STATUS, {"devices": devices})
    assert read() == (marked, "")


@pytest.mark.parametrize(
    ("gpus", "marked"),
    [
        ("0,2", {0, 2}),
        ("3", {3}),
        (" 1 , 2 ,", {1, 2}),
        ("", set()),
        (",,", set()),
        ("1\n", {1}),
    ],
    ids=["two", "one", "with blanks", "empty", "commas", "with a line's end"],
)
def test_the_marks_of_unhealthy_gpus(
    server: FakeApiServer, read: Read, gpus: str, marked: set[int]
) -> None:
    lay(server, UNHEALTHY, {"gpus": gpus})
    assert read() == (marked, "")


def test_both_kinds_count(server: FakeApiServer, read: Read) -> None:
    lay(server, STATUS, {"devices": status(True, False)})
    lay(server, UNHEALTHY, {"gpus": "1,3"})
    assert read() == ({1, 3}, "")


def test_those_of_other_nodes_and_other_namespaces_do_not_count(
    server: FakeApiServer, read: Read
) -> None:
    lay(server, "node-2-device-status", {"devices": status(False)})
    metadata = {"name": UNHEALTHY, "namespace": "default"}
    server.put("configmaps", {"metadata": metadata, "data": {"gpus": "1"}})
    assert read() == (set(), "")


# --- what is not ----------------------------------------------------------------------------------

BROKEN: dict[str, Any] = {
    "no data": None,
    "no devices": {},
    "another key": {"device": status(False)},
    "no YAML": {"devices": "{"},
    "a tab": {"devices": "-\tdeviceId: 0\n\t- x"},
    "a text": {"devices": "all of them"},
    "a number": {"devices": "5"},
    "a mapping": {"devices": "deviceId: 0"},
    "a list of texts": {"devices": "- gpu0\n- gpu1"},
    "no id": {"devices": "- {deviceType: gpu, healthy: false}"},
    "no type": {"devices": "- {deviceId: 0, healthy: false}"},
    "no health": {"devices": "- {deviceId: 0, deviceType: gpu}"},
    "a health that is a text": {"devices": "- {deviceId: 0, deviceType: gpu, healthy: 'false'}"},
    "a health that is a number": {"devices": "- {deviceId: 0, deviceType: gpu, healthy: 0}"},
    "a negative index": {"devices": "- {deviceId: -1, deviceType: gpu, healthy: false}"},
    "a huge index": {"devices": "- {deviceId: 99999, deviceType: gpu, healthy: false}"},
    "an index of ten thousand digits": {
        "devices": f"- {{deviceId: {'9' * 10_000}, deviceType: gpu, healthy: false}}"
    },
    "a UUID": {"devices": "- {deviceId: GPU-1, deviceType: gpu, healthy: false}"},
    "one of two is broken": {"devices": status(False) + "- 5\n"},
    "an object of Python": {"devices": "!!python/object/apply:os.system ['true']"},
    "a tag that nobody knows": {"devices": "- !gpu {deviceId: 0}"},
    "nested too deeply": {"devices": "[" * 5000},
    "two documents": {"devices": "---\n[]\n---\n[]\n"},
    "an unprintable character": {"devices": "- \x00"},
    "a day that does not exist": {"devices": "- 2026-13-45"},
    "an anchor that nobody set": {"devices": "- *a"},
    "a list in itself": {"devices": "&a [*a]"},
    "too long": {"devices": "#" * (65 << 10)},
    "a tagged truth that is none": {"devices": "- !!bool maybe"},
    "a tagged time that is none": {"devices": "- !!timestamp soon"},
    "a tagged number that is empty": {"devices": "- !!int ''"},
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_device_status_that_makes_no_sense_is_told_and_marks_nothing(
    server: FakeApiServer, read: Read, data: Any
) -> None:
    lay(server, UNHEALTHY, {"gpus": "2"})
    lay(server, STATUS, data)
    marked, problem = read()
    assert marked == {2}
    assert problem.startswith(f"ConfigMap {NAMESPACE}/{STATUS}: ")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"gpus": "all"}, id="a word"),
        pytest.param({"gpus": "0-2"}, id="a range"),
        pytest.param({"gpus": "0;1"}, id="another separator"),
        pytest.param({"gpus": "-1"}, id="a negative index"),
        pytest.param({"gpus": "99999"}, id="a huge index"),
        pytest.param({"gpus": "1,2,x"}, id="one of three is broken"),
        pytest.param({"gpus": "\u0663"}, id="a digit of another script"),
        pytest.param({"gpus": "x" * (512 << 10)}, id="half a megabyte"),
    ],
)
def test_unhealthy_gpus_that_make_no_sense_are_told_and_mark_nothing(
    server: FakeApiServer, read: Read, data: Any
) -> None:
    lay(server, STATUS, {"devices": status(False)})
    lay(server, UNHEALTHY, data)
    marked, problem = read()
    assert marked == {0}
    assert problem.startswith(f"ConfigMap {NAMESPACE}/{UNHEALTHY}: ")


def test_both_kinds_may_make_no_sense(server: FakeApiServer, read: Read) -> None:
    lay(server, STATUS, {"devices": "{"})
    lay(server, UNHEALTHY, {"gpus": "x"})
    marked, problem = read()
    assert marked == set()
    assert STATUS in problem
    assert UNHEALTHY in problem


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        pytest.param("{", "not YAML", id="no YAML"),
        pytest.param("[" * 5000, "nested too deeply", id="nested too deeply"),
        pytest.param(
            "- \x00",
            "character",
            id="an unprintable character",
        ),
        pytest.param(
            "- 2026-13-45",
            "month",
            id="a day that does not exist",
        ),
    ],
)
def test_the_sentence_says_what_is_wrong(
    server: FakeApiServer, read: Read, devices: str, words: str
) -> None:
    lay(server, STATUS, {"devices": devices})
    assert words in read()[1]


SHAPES = ["[]", "5", '"text"', '{"data": 5}', '{"data": []}', '{"data": {"devices": 5, "gpus": 5}}']


@pytest.mark.parametrize("body", SHAPES)
def test_an_answer_that_is_no_config_map(server: FakeApiServer, read: Read, body: str) -> None:
    """Only what speaks KubeApiError or a problem."""
    server.fail(say(body))
    try:
        marked, problem = read()
    except KubeApiError:
        return
    assert marked == set()
    assert problem


texts = st.text(alphabet="-[]{}:,&*!|>'\"# \nab01gpu", max_size=60) | st.sampled_from(
    [status(False), "- {deviceId: 1, deviceType: gpu, healthy: false}", "0,1"]
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(devices=texts, gpus=texts)
def test_any_text_is_taken_for_what_it_is(
    server: FakeApiServer, read: Read, devices: str, gpus: str
) -> None:
    lay(server, STATUS, {"devices": devices})
    lay(server, UNHEALTHY, {"gpus": gpus})
    marked, _ = read()
    assert all(0 <= one < 10_000 for one in marked)


def test_a_long_text_takes_no_long_time(server: FakeApiServer, read: Read) -> None:
    """As long as it may be, and as tangled."""
    nine = {n: ", ".join([f"*a{n - 1}"] * 9) for n in range(1, 9)}
    laughs = "".join(f"- &a{n} [{names}]\n" for n, names in nine.items())
    lay(server, STATUS, {"devices": "- &a0 ha\n" + laughs})
    start_s = time.monotonic()
    assert read()[1]
    lay(server, STATUS, {"devices": (status(False) * 2000)[: 60 << 10].rsplit("- ", 1)[0]})
    assert read() == ({0}, "")
    assert time.monotonic() - start_s < 10.0  # a fraction of a second, on a machine that is slow


# --- what cannot be read --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        pytest.param(refuse(500), 500, id="500"),
        pytest.param(refuse(403), 403, id="403"),
        pytest.param(say("<html>", content_type="text/html"), None, id="a page"),
        pytest.param(cut(20), None, id="half an answer"),
        pytest.param(say("not found", 404, "text/plain"), 404, id="no path of that kind"),
    ],
)
def test_config_maps_that_cannot_be_read_are_an_error(
    server: FakeApiServer, read: Read, fault: Any, code: int | None
) -> None:
    """For then nothing is known; what was marked stays marked."""
    lay(server, STATUS, {"devices": status(False)})
    server.fail(fault)
    with pytest.raises(KubeApiError) as error:
        read()
    assert error.value.status in (code, None) if code is None else error.value.status == code


def test_one_of_both_that_may_not_be_read_is_an_error(server: FakeApiServer, read: Read) -> None:
    rule = Rule(verbs=("get",), resources=("configmaps",), names=(STATUS,))
    server.users["token"] = User(name="agent", rules=(rule,))
    with pytest.raises(KubeApiError, match=UNHEALTHY) as error:
        read()
    assert error.value.status == 403
