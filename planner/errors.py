"""What the planner raises."""

from __future__ import annotations

from collections.abc import Sequence

from slidedp_jax.planner.limits import Limit
from slidedp_jax.planner.request import Request


class PlanError(ValueError):
    """The job cannot be planned; the message is one paragraph per limit, for the user.

    Attributes:
      limits: what the leanest strategy exceeds; none where the request itself is wrong.
      request: of what nothing fits; None as above.
    """

    def __init__(self, message: str, limits: Sequence[Limit] = (), request: Request | None = None):
        super().__init__(message)
        self.limits = tuple(limits)
        self.request = request
