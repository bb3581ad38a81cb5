#!/usr/bin/env bash
# Runs the tests on the newest released JAX, in an environment of its own, .venv-newest.
#
# The newest JAX may need a newer Python than the usual one: PYTHON names it, else the newest on the
# PATH is taken. Arguments go to pytest (-k NAME, -x, --thorough, ...); tests/test_jax_internals.py
# runs first and whole: it says within a minute what has changed. What is compared with PyTorch,
# transformers and google-tunix is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

for python in "${PYTHON:-}" python3.14 python3.13 python3.12; do
    if [ -n "$python" ] && "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        PYTHON=$python
        break
    fi
done
python=$(find_python)
[ -x .venv-newest/bin/python ] || "$python" -m venv .venv-newest
.venv-newest/bin/python -m pip install --quiet --no-compile --upgrade --upgrade-strategy eager \
    --editable '.[test]'
.venv-newest/bin/python - <<'PYTHON'
from importlib.metadata import version

names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
print("Testing with", ", ".join(f"{name} {version(name)}" for name in names))
PYTHON
workers=$(.venv-newest/bin/python -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')
.venv-newest/bin/python -m pytest -q -n 0 --thorough tests/test_jax_internals.py
.venv-newest/bin/python -m pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
