"""Which points of a matrix every run of the tests has."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def mostly_thorough(cases: Iterable[Any], often: Container[Any]) -> list[Any]:
    """Values of a parameter, of which all but those in `often` are for --thorough."""
    cases = list(cases)
    assert any(case in often for case in cases), f"none of {cases} is in {often}"
    return [
        case if case in often else pytest.param(case, marks=pytest.mark.thorough) for case in cases
    ]
