# Sourced by the other scripts: makes virtual environments in the repository.
#
#   make_environment FOLDER [EXTRAS]   e.g. .venv-test test,dev; what is installed is left as it is
#   cuda_extra [FILE]                  the extra for this machine's NVIDIA driver; none without one

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

# JAX's wheels need driver 580 for CUDA 13 and 525 for CUDA 12:
# https://docs.jax.dev/en/latest/installation.html
cuda_extra() {
    local version file=${1:-/proc/driver/nvidia/version}
    [ -e "$file" ] || return 0
    version=$(grep -m 1 -o '  [0-9]\{3,\}\.[0-9.]*' "$file" | tr -d ' ') || true
    if [ -z "$version" ]; then
        echo "$file tells no version of the NVIDIA driver; the one of CUDA 13 is assumed" >&2
        echo cuda13
    elif [ "${version%%.*}" -ge 580 ]; then
        echo cuda13
    elif [ "${version%%.*}" -ge 525 ]; then
        echo cuda12
    else
        echo "The NVIDIA driver is $version; JAX needs 525 or newer. The CPU is used." >&2
    fi
}

make_environment() {
    local python stamp folder=$1 what=".${2:+[$2]}"
    if [ ! -x "$folder/bin/python" ]; then
        python=$(find_python) || return 1
        echo "Making $folder with $("$python" --version)"
        "$python" -m venv "$folder" || return 1
    fi
    stamp="$folder/installed-${2:-plain}-$(cksum <pyproject.toml | tr ' ' '-')"
    if [ ! -e "$stamp" ]; then
        echo "Installing slidedp_jax${2:+[$2]} into $folder"
        # What is imported gets compiled then: half the time of installing it.
        "$folder/bin/python" -m pip install --quiet --no-compile --editable "$what" || return 1
        touch "$stamp"
    fi
}
