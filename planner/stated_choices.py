"""What decisions of the user cost, where the search would have taken others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from slidedp_jax.planner.errors import PlanError
from slidedp_jax.planner.job import Alternative
from slidedp_jax.planner.search import Plan

HARDLY_SLOWER = 1.005
"""Times of a step that are not worth a word."""


def cost_of_choices(
    found: Plan, stated: Mapping[str, object], free: Callable[[], Plan]
) -> list[str]:
    """A note on how much faster a step would be without what was stated, if it would.

    Args:
      found: the plan as stated.
      stated: name -> value of what the user has decided; None is not stated.
      free: plans the same job without.
    """
    decided = {name: value for name, value in stated.items() if value is not None}
    if not decided:
        return []
    try:
        other = free().chosen
    except PlanError:  # with something else in the way: this is what fits
        return []
    step_s, free_s = found.chosen.time.step_s, other.time.step_s
    if step_s <= HARDLY_SLOWER * free_s:
        return []
    words = ", ".join(f"{name} {value}" for name, value in decided.items())
    return [
        f"as stated ({words}) a step takes {step_s:.3f} s; left to the planner, {free_s:.3f} s: "
        f"{difference(other, found.chosen)}"
    ]


def difference(other: Alternative, chosen: Alternative) -> str:
    """What of another strategy is not as in the chosen one."""
    ours, theirs = asdict(chosen.strategy), asdict(other.strategy)
    return ", ".join(f"{name} {value}" for name, value in theirs.items() if value != ours[name])


def why_not(other: Alternative, chosen: Alternative) -> str | None:
    """Why a strategy that is not slower than the chosen one was not taken; None: it is slower."""
    if other.time.step_s >= chosen.time.step_s:
        return None
    if other.strategy.layers_per_chunk > chosen.strategy.layers_per_chunk:
        return "so little faster that programs of fewer layers, which compile sooner, are taken"
    return "so little faster for the host memory that it takes"
