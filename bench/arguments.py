"""What the command lines of the smaller benchmarks have in common."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxgemv._ffi import cpu_isas, set_cpu_isa


def words(text: str) -> list[str]:
    return text.split(",")


def number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number must be a whole one from 1 on; got {text!r}")
    return int(text)


def numbers(text: str) -> list[int]:
    return [number(part) for part in text.split(",")]


def shape(text: str) -> tuple[int, int]:
    n, cross, k = text.lower().partition("x")
    if not cross:
        raise argparse.ArgumentTypeError(f"a shape must be N x K, 4096x4096 say; got {text!r}")
    return number(n), number(k)


def shapes(text: str) -> list[tuple[int, int]]:
    return [shape(part) for part in text.split(",")]


def saved(module: str, path: Path, row: Callable[..., Any] = dict) -> dict[str, Any]:
    """A result that a benchmark wrote. row: makes something of each of its rows, if they are of the right kind."""
    try:
        result = json.loads(path.read_text())
        rows = [row(**each) for each in result["rows"]]
        return {"environment": result["environment"], "method": result["method"], "rows": rows}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"{module}: {path} is no result of a benchmark: {error}") from None


def use_isa(module: str, name: str | None) -> None:
    """Another instruction set of the CPU than the best, if one is named."""
    if name is None:
        return
    if name not in cpu_isas():
        raise SystemExit(f"{module}: --isa must be one of {', '.join(cpu_isas())}; got {name}")
    set_cpu_isa(name)


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
