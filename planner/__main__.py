"""`python -m planner`, or `python -m slidedp_jax.planner`."""

import sys

from slidedp_jax.planner.command import main

if __name__ == "__main__":
    sys.exit(main())
