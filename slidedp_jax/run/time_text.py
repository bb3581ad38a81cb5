"""Lengths of time for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A rough length: `0.042 s`, `19.0 s`, `12 min`, `4.1 h`, `2.3 days`."""
    if seconds < 99.95:
        return f"{seconds:.3g} s" if seconds < 9.995 else f"{seconds:.1f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: `0:07`, `12:30`, `1:02:03`; whole seconds, none below 0."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
