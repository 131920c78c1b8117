"""The pods' fingerprint, against published ones and against XXH64 as its description has it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.fingerprint import fingerprint

Pods = list[tuple[str, str]]

# Source: podfingerprint, what its own tests and its package have.
PUBLISHED: dict[str, tuple[Pods, str]] = {
    "no pods": ([], "pfp0v001ef46db3751d8e999"),
    "three pods of one namespace": (
        [
            ("production", "jaeger-dpgjk"),
            ("production", "nginx-rt684"),
            ("production", "envoy-g9m22"),
        ],
        "pfp0v001607b76a0e9d3aeb4",
    ),
    "ten pods of six namespaces": (
        [
            ("analytics", "controller-69dkj"),
            ("kube-public", "subscriber-tq6v7"),
            ("kube-public", "transformer-hfbng"),
            ("kube-public", "validator-c6pn5"),
            ("kube-system", "proxy-wszrd"),
            ("middleware", "processor-jkrl4"),
            ("network", "gateway-vsll5"),
            ("network", "importer-kzdfr"),
            ("network", "importer-q5vt9"),
            ("staging", "prometheus-bwgbn"),
        ],
        "pfp0v001567144e4a561bb5a",
    ),
}


@pytest.mark.parametrize(("pods", "published"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_fingerprints(pods: Pods, published: str) -> None:
    assert fingerprint(pods) == published
    assert fingerprint(reversed(pods)) == published


def test_a_pod_is_known_by_its_namespace_too() -> None:
    assert (
        len({fingerprint([pod]) for pod in [("a", "b"), ("b", "a"), ("", "ab"), ("ab", "")]}) == 4
    )


def test_two_pods_of_one_name_are_two() -> None:
    assert fingerprint([("ns", "pod")] * 2) != fingerprint([("ns", "pod")])


@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=40)), max_size=6))
def test_any_fingerprint_is_as_described(pods: Pods) -> None:
    hashes = sorted(xxh64(name.encode(), xxh64(space.encode(), 0)) for space, name in pods)
    words = b"".join(one.to_bytes(8, "little") for one in hashes)
    assert fingerprint(pods) == "pfp0v001" + xxh64(words, 0).to_bytes(8, "big").hex()


# --- XXH64, from its published description --------------------------------------------------------

P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
MASK = (1 << 64) - 1


def xxh64(data: bytes, seed: int) -> int:
    stripes = len(data) // 32 * 32
    total = seed + P5
    if stripes:
        lanes = [seed + P1 + P2, seed + P2, seed, seed - P1]
        for at in range(0, stripes, 32):
            words = [data[at + 8 * lane : at + 8 * lane + 8] for lane in range(4)]
            lanes = [step(lane, word) for lane, word in zip(lanes, words, strict=True)]
        total = sum(turn(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            total = (total ^ step(0, lane)) * P1 + P4
    return avalanche(tail(total + len(data), data[stripes:]))


def tail(total: int, rest: Sequence[int]) -> int:
    while len(rest) >= 8:
        total = turn(total ^ step(0, rest[:8]), 27) * P1 + P4
        rest = rest[8:]
    if len(rest) >= 4:
        total = turn(total ^ int.from_bytes(rest[:4], "little") * P1, 23) * P2 + P3
        rest = rest[4:]
    for byte in rest:
        total = turn(total ^ byte * P5, 11) * P1
    return total & MASK


def step(lane: int, word: int | Sequence[int]) -> int:
    number = word if isinstance(word, int) else int.from_bytes(word, "little")
    return turn(lane + number * P2, 31) * P1 & MASK


def turn(number: int, by: int) -> int:
    number &= MASK
    return (number << by | number >> 64 - by) & MASK


def avalanche(total: int) -> int:
    total = (total ^ total >> 33) * P2 & MASK
    total = (total ^ total >> 29) * P3 & MASK
    return total ^ total >> 32
