"""The fingerprint of the pods on a node, by which a scheduler knows what a report speaks of."""

from collections.abc import Iterable

import xxhash


def fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """The fingerprint of these pods, as (namespace, name) in any order, `pfp0v001` and 16 digits.

    Pods are not told apart by uid. Source: podfingerprint, version 1: the XXH64 of each name,
    seeded with that of its namespace; of these as unsigned numbers in ascending order, 8 bytes
    each, the lowest first, again the XXH64.
    """
    hashes = sorted(_hash(name, seed=_hash(namespace)) for namespace, name in pods)
    total = b"".join(one.to_bytes(8, "little") for one in hashes)
    return f"pfp0v001{xxhash.xxh64_hexdigest(total)}"


def _hash(text: str, seed: int = 0) -> int:
    return xxhash.xxh64_intdigest(text.encode(), seed)
