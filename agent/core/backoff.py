"""How long to wait before something that failed is tried again."""


def doubled_s(failures: int, first_s: float, longest_s: float) -> float:
    """After so many failures in a row, 0 for none, without jitter: doubled each time."""
    return min(longest_s, first_s * 2.0 ** min(failures, 16))
