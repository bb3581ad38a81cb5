"""Which strategies fit, each as lean as it must be and as fast as it then can."""

from __future__ import annotations

from collections.abc import Iterable

from slidedp_jax.planner.host_boundaries import fewest_on_host
from slidedp_jax.planner.job import Job
from slidedp_jax.planner.spare_memory import keeping_most, relieving_host
from slidedp_jax.planner.strategy import Strategy


def sort_by_fit(
    job: Job,
    families: Iterable[Iterable[Strategy]],
    keep_activations: bool,
    resident_state: bool,
) -> tuple[list[tuple[float, Strategy]], list[list[Strategy]]]:
    """The first of each family that fits, by a lower bound of its step; those before it.

    Args:
      job: with the budgets.
      families: of strategies, in each from fast to lean.
      keep_activations: keep results of as many layer chunks as then fit.
      resident_state: let state stay on the devices where the host has no room for it.
    """
    fitting, misfits = [], []
    for family in families:
        before = []
        for strategy in family:
            option, fits = _eased(job, strategy, resident_state)
            if not fits:
                before.append(option)
                continue
            if keep_activations:
                option = keeping_most(job, option)
            fitting.append((job.lower_bound_s(option), option))
            break
        misfits.append(before)
    return sorted(fitting, key=lambda item: item[0]), misfits


def _eased(job: Job, strategy: Strategy, resident_state: bool) -> tuple[Strategy, bool]:
    """The strategy with what makes it fit, and whether it then does."""
    if not job.fits_devices(strategy):
        eased = fewest_on_host(job, strategy)
        if eased is None:
            return strategy, False
        strategy = eased
    if job.fits_host(strategy):
        return strategy, True
    if resident_state and strategy.gradient_route == "reduce_scatter":
        return relieving_host(job, strategy)
    return strategy, False
