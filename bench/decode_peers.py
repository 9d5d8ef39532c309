"""Other decoders of the same shape or file. Each library has a process of its own, whose end is not ours.

The process gets its cells as JSON on stdin, and answers with a line of JSON for each.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_LIMIT = 300  # seconds for a cell; a library that hangs is ended
LLAMA_CPP = "xllamacpp", "ik_llama_cpp", "llama_cpp"  # Python bindings of llama.cpp


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def measure(name: str, cells: list[dict]) -> Iterator[dict]:
    """For each cell `us` and `rounds_us`, perhaps `compile_s`; or the reason for which there is none as `note`."""
    module = "bench.decode_torch" if name == "torch" else "bench.decode_llama"
    left = len(cells)
    with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+") as errors:
        json.dump([cell | {"library": name} for cell in cells], asked)
        asked.seek(0)
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # the GPU is the library's
        command = [sys.executable, "-m", module]
        streams = {"stdin": asked, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        with subprocess.Popen(command, cwd=_ROOT, env=environment, **streams) as process:
            try:
                while left and (line := _line(process)):
                    left -= 1
                    yield json.loads(line)
                status = process.wait() if left else 0
            finally:
                process.kill()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [""])[-1]
    for _ in range(left):
        yield {"note": f"its process ended with status {status}: {last}"}


def reason(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _line(process: subprocess.Popen) -> str:
    stop = threading.Timer(_LIMIT, process.kill)
    stop.start()
    try:
        return process.stdout.readline()
    finally:
        stop.cancel()


def answer(decode: Callable[[dict], dict]) -> None:
    """What such a process does. decode(cell): `rounds_us`, of each round what one token took, and perhaps more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    for cell in json.load(sys.stdin):
        try:
            result = decode(cell)
            result["us"] = statistics.median(result["rounds_us"])
        except Exception as error:
            traceback.print_exc()
            result = {"note": reason(error)}
        print(json.dumps(result), file=answers, flush=True)
