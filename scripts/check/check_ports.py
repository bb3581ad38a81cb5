"""Models of others, unchanged: trained by stages as by their own forward pass.

    python scripts/check/check_ports.py [SET ...] [--packages FOLDER] [--sources FOLDER]

Sets are tunix, transformers, libraries, more and sources. What they need beside this project's own
packages is installed into FOLDER without its dependencies (a temporary folder by default); each set
runs with its own in a process of its own. `sources` needs checkouts, which are no packages:
FOLDER/flax (google/flax), FOLDER/llama-2-jax (ayaka14732), FOLDER/big_vision (google-research) and
FOLDER/nanodo (google-deepmind). Every model trains on one and on three devices (of the CPU).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import slidedp_jax

SETS = ("tunix", "transformers", "libraries", "more", "sources")
DEVICES = (1, 3)
HERE = Path(__file__).parent
PACKAGES = {
    "tunix": ["-r", str(HERE.parent / "tunix_requirements.txt"), "einops"],
    "transformers": [
        *("transformers==4.57.6", "huggingface_hub<1.0", "tokenizers<0.23", "regex", "requests"),
        *("urllib3", "charset-normalizer", "idna", "certifi"),
    ],
    "libraries": ["equinox", "dm-haiku", "jmp", "tabulate", "jaxtyping", "wadler_lindig"],
    "more": ["mamba2-jax", "nano-moe-jax", "dantinox"],
    "sources": ["einops", "ml_collections"],
}


def main() -> None:
    """Install, then run each set by itself."""
    args = _arguments()
    if args.alone:
        sys.exit(_run(args.sets[0], args.only))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.packages or Path(temporary)
        failed = []
        for name in args.sets:
            _install(folder / name, PACKAGES[name])
            paths = [str(folder / name), str(args.sources), os.environ.get("PYTHONPATH", "")]
            environment = os.environ | {
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_flags()}",
                "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *paths]),
                "PORT_SOURCES": str(args.sources),
            }
            command = [sys.executable, __file__, name, "--alone", *_only(args)]
            if subprocess.run(command, env=environment, check=False).returncode:
                failed.append(name)
    sys.exit(f"differences or errors in: {', '.join(failed)}" if failed else 0)


def _run(name: str, only: str) -> int:
    """Number of ports that fail."""
    warnings.filterwarnings("ignore")  # the packages' own
    slidedp_jax.configure(platform="cpu", num_devices=max(DEVICES))
    from port_training import compare

    failed = 0
    for make in importlib.import_module(f"ports_{name}").ports():
        try:
            port = make()
            if only in port.name:
                failed += not compare(port, DEVICES)
        except Exception:  # whatever a port raises, the others are still to be tried
            traceback.print_exc(limit=-4)
            failed += 1
    return failed


def _install(folder: Path, packages: list[str]) -> None:
    if folder.is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(folder), *packages], check=True)


def _flags() -> str:
    """Programs are small and run a few times, so that compiling them is most of the work."""
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if importlib.metadata.version("jax").startswith("0.10."):
        # Its CPU compiler ends the process at dantinox; later versions do not know the flag.
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


def _only(args: argparse.Namespace) -> list[str]:
    return ["--only", args.only] if args.only else []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="*", default=SETS, metavar="SET", help=", ".join(SETS))
    parser.add_argument("--packages", type=Path, help="folder that keeps what is installed")
    parser.add_argument("--sources", type=Path, default=Path("."), help="folder of checkouts")
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.sets) - set(SETS):
        parser.error(f"no set {sorted(unknown)}; there are {', '.join(SETS)}")
    return args


if __name__ == "__main__":
    main()
