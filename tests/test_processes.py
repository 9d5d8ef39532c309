"""Two processes of one host over jax.distributed: the programs of one process, with collectives between the two."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 300  # for what takes a few


@pytest.mark.parametrize("what", ["Auto", "Explicit", "shard_map"])
def test_two_processes(what):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).parent / "process.py"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script), str(rank), port, what],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output
        assert output.count("right") == 5, output
