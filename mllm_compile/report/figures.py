"""Writes times and rates as people read them: three digits and a unit."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """0.00123 → `1.23 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{three_digits(seconds * scale)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"


def three_digits(value: float) -> str:
    """1234 → `1,234`, 12.345 → `12.3`, 0.01234 → `0.0123`."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def format_rate(per_second: float, what: str = "B") -> str:
    """Bytes or operations a second, in powers of 1000 as ceilings are told: `4.31 TB/s`, `56.8 GFLOP/s`."""
    for prefix, scale in (("T", 1e12), ("G", 1e9)):
        if per_second >= scale:
            return f"{three_digits(per_second / scale)} {prefix}{what}/s"
    return f"{three_digits(per_second / 1e6)} M{what}/s"
