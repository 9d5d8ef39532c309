"""Compiled programs in a second process: from JAX's persistent compilation cache, and from a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from jax.sharding import AxisType, PartitionSpec as P
from problems import Case, make
from sharded import mesh_of, put, put_weight
from jaxgemv import gemv

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
p = make(np.random.default_rng(0), 4, "float32", Case(2, 16, 512, 64))

def found(f, x, w):
    events.clear()
    jax.jit(f).lower(x, w).compile()
    return "/jax/compilation_cache/cache_hits" in events

print("one device", found(gemv, p.x, p.tensor))
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = mesh_of(kind)
    args = put(p.x, mesh), put_weight(p.tensor, mesh, "model", None)
    print(kind.name, found(gemv, *args))
f = jax.shard_map(gemv, mesh=mesh, in_specs=(P(), P("model")), out_specs=P(None, "model"))
print("shard_map", found(f, *args))
"""


def run(script: str, *arguments: str, platform: str = "cpu") -> list[str]:
    """What it prints."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        # A GPU's memory is taken already, by the process of the tests.
        env=os.environ
        | {"JAX_PLATFORMS": platform, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


def test_second_process(tmp_path):
    """All but programs over Auto axes, in which JAX writes down where in memory our function is."""
    assert run(SCRIPT, str(tmp_path)) == [
        "one device False",
        "Auto False",
        "Explicit False",
        "shard_map False",
    ]
    assert run(SCRIPT, str(tmp_path)) == ["one device True", "Auto False", "Explicit True", "shard_map True"]


EXECUTABLE = """
import pickle, sys
from pathlib import Path
import jax
import numpy as np
from jax.experimental import serialize_executable
from problems import Case, make
from jaxgemv import gemv_int4

file = Path(sys.argv[1])
p = make(np.random.default_rng(0), 4, "float32", Case(3, 40, 256, 64, "zero", bias=True), exact=True)
args = p.x, p.packed, p.zero, p.scale, p.bias
f = jax.jit(lambda x, wq, zero, scale, bias: gemv_int4(x, wq, zero, scale, bias=bias, implementation=sys.argv[2]))
if not file.exists():
    file.write_bytes(pickle.dumps(serialize_executable.serialize(f.lower(*args).compile())))
    print("written")
else:
    f = serialize_executable.deserialize_and_load(
        *pickle.loads(file.read_bytes()), execution_devices=jax.devices()[:1]
    )
    print("right" if np.array_equal(f(*args), p.answer()) else "wrong")
"""


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_executable_in_a_file(platform, tmp_path):
    """The process that loads it compiles nothing and traces nothing; it has imported jaxgemv."""
    file = str(tmp_path / "executable")
    assert run(EXECUTABLE, file, platform, platform=platform) == ["written"]
    assert run(EXECUTABLE, file, platform, platform=platform) == ["right"]
