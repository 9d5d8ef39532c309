"""What the command lines of the smaller benchmarks have in common."""

import argparse
from pathlib import Path

import jax


def parser(module: str, doc: str, *, saves: bool = True) -> argparse.ArgumentParser:
    """With --platform, and where results are saved --out and --commit."""
    made = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--platform", choices=("cpu", "cuda"), help="default: JAX's")
    if saves:
        made.add_argument("--out", type=Path, metavar="FILE", help="write JSON to FILE")
        made.add_argument("--commit", help="recorded in the JSON (default: $JAXGEMV_COMMIT, or git's HEAD)")
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, of which JAX has been told the platform."""
    args = made.parse_args()
    if args.platform:
        jax.config.update("jax_platforms", args.platform)
    return args
