# Sourced by the other scripts: makes the virtual environment .venv in the repository.
#
#   make_environment [EXTRAS]    e.g. test,dev; what is installed already is left as it is

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.11 python3.12 python3.13 python3.14; do
        if "$candidate" -c 'import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer with its venv module is needed (on Debian: apt install" \
        "python3-venv). Set PYTHON to one that is not on the PATH." >&2
    return 1
}

make_environment() {
    local python stamp what=".${1:+[$1]}"
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python) || return 1
        echo "Making .venv with $("$python" --version)"
        "$python" -m venv .venv || return 1
    fi
    stamp=".venv/installed-${1:-plain}-$(cksum <pyproject.toml | tr ' ' '-')"
    if [ ! -e "$stamp" ]; then
        echo "Installing slidedp_jax${1:+[$1]} into .venv"
        # What is imported gets compiled then: half the time of installing it.
        .venv/bin/python -m pip install --quiet --no-compile --editable "$what" || return 1
        touch "$stamp"
    fi
}
