"""Whole numbers on the host, for launchers: Triton's own functions of them take 5 us a call, and a step makes many."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two of at least n; 1 for 0."""
    return 1 << max(0, n - 1).bit_length()
