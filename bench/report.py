"""What a run leaves behind: the table, and a JSON file that says where the numbers come from."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jaxlib
from rich.table import Table

import jaxgemv
from bench import native

_ROOT = Path(__file__).parent.parent
_WRONG = 1e-2  # a relative error that rounding to bfloat16 does not reach
_HOST_BOUND = 0.9


@dataclass
class Row:
    n: int
    k: int
    rows: int  # of x: M
    dtype: str  # of x
    format: str
    system: str
    us: float
    spread: float
    enqueue_us: float | None
    calls: int
    nbytes: int  # weight, x and y
    gb_per_s: float
    floor_us: float | None
    kernel_us: float | None  # in a captured graph: no gaps of XLA's
    kernel_floor_us: float | None
    error: float  # ||y - ref|| / ||ref||
    kernel_over_floor: float | None = None
    over_floor: float | None = None
    speedup: float | None = None  # over the baseline
    note: str | None = None  # why this is not a kernel's time


def compare(rows: list[Row], baseline: tuple[str, str]) -> None:
    """Fills in what needs other rows."""
    times = {(r.n, r.k, r.rows): r.us for r in rows if (r.system, r.format) == baseline}
    for r in rows:
        r.over_floor = r.us / r.floor_us if r.floor_us else None
        if r.kernel_us and r.kernel_floor_us:
            r.kernel_over_floor = r.kernel_us / r.kernel_floor_us
        base = times.get((r.n, r.k, r.rows))
        r.speedup = base / r.us if base else None


def table(rows: list[Row], device: str, baseline: tuple[str, str]) -> Table:
    out = Table(title=f"{device}, jaxgemv {jaxgemv.__version__}, jax {jax.__version__}", title_justify="left")
    for name in ("N x K", "M", "x", "weights", "system"):
        out.add_column(name, no_wrap=True)
    alone = ("kernel us", "floor us", "x floor") if any(r.kernel_us for r in rows) else ()
    for name in ("us", "±%", "GB/s", "floor us", "x floor", *alone, f"x {' '.join(baseline)}", "err"):
        out.add_column(name, justify="right", no_wrap=True)
    problem = None
    for r in rows:
        if problem != (problem := (r.n, r.k, r.rows)):
            out.add_section()
        right = r.error < _WRONG  # so that NaN is wrong
        out.add_row(
            f"{r.n} x {r.k}",
            str(r.rows),
            r.dtype,
            r.format,
            r.system + (" (no kernel)" if r.note else ""),
            f"{r.us:.2f}" + ("*" if _host_bound(r) else ""),
            f"{100 * r.spread:.1f}",
            f"{r.gb_per_s:.0f}" if r.gb_per_s > 100 else f"{r.gb_per_s:.1f}",
            _number(r.floor_us),
            _number(r.over_floor),
            *(map(_number, (r.kernel_us, r.kernel_floor_us, r.kernel_over_floor)) if alone else ()),
            _number(r.speedup),
            f"{r.error:.0e}" if right else f"[bold red]{r.error:.0e} WRONG[/]",
        )
    return out


def notes(rows: list[Row], how: str, empty_us: float | None) -> list[str]:
    """What the table does not say by itself."""
    lines = [
        "us: one call inside jit, gaps between calls included, cold weights; ±%: interquartile range of the repeats.",
        "GB/s and floor: the bytes of the weight with its scales and zeros, x and y, each counted once.",
        f"floor: {how}.",
    ]
    if any(r.kernel_us for r in rows):
        lines.append("kernel us, and the two columns after it: the same calls in one captured CUDA graph.")
    if empty_us is not None:
        lines.append(f"A call that reads 16 bytes takes {empty_us:.2f} us.")
    if any(_host_bound(r) for r in rows):
        lines.append("*: the host enqueued no faster than this; the device may be faster.")
    lines += sorted({f"no kernel: {r.note}; this is the reference." for r in rows if r.note})
    return lines


def _host_bound(row: Row) -> bool:
    return row.enqueue_us is not None and row.enqueue_us > _HOST_BOUND * row.us


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def environment(device, commit: str | None) -> dict:
    """Everything that a number depends on."""
    env = {
        "device": device_name(device),
        "platform": device.platform,
        "os": platform.platform(),
        "python": platform.python_version(),
        "jaxgemv": jaxgemv.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": commit or os.environ.get("JAXGEMV_COMMIT") or _git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    if device.platform == "gpu":
        env["compute_capability"] = str(device.compute_capability)
        env["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        env["cuda"] = {
            d.metadata["Name"]: d.version
            for d in importlib.metadata.distributions()
            if re.match(
                r"jax.cuda\d+.plugin$|nvidia.cuda.(nvcc|runtime)|nvidia.cublas", d.metadata["Name"] or ""
            )
        }
        nvcc = re.search(r"release ([\d.]+)", _output(native.nvcc() or "nvcc", "--version") or "")
        env["nvcc"] = nvcc.group(1) if nvcc else None
    else:
        env["threads"] = os.cpu_count()
    return env


def device_name(device) -> str:
    if device.platform != "cpu":
        return device.device_kind
    try:
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    return model.group(1) if model else platform.processor() or platform.machine()


def save(path: Path | None, env: dict, method: dict, rows: list[Row]) -> Path:
    """Writes the JSON, by default to bench/results/<device>-<date>.json."""
    if path is None:
        slug = re.sub(r"[^a-z0-9]+", "-", env["device"].lower()).strip("-")
        path = _ROOT / "bench/results" / f"{slug}-{env['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": env, "method": method, "rows": [asdict(r) for r in rows]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def _git_commit() -> str | None:
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changed else commit


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
