"""What the planner raises."""

from __future__ import annotations

from collections.abc import Sequence

from slidedp_jax.planner.limits import Limit


class PlanError(ValueError):
    """The job cannot be planned; the message is one paragraph per limit, for the user.

    Attributes:
      limits: what is exceeded; none where the request itself is wrong.
    """

    def __init__(self, message: str, limits: Sequence[Limit] = ()):
        super().__init__(message)
        self.limits = tuple(limits)
