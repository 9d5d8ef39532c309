"""JAX's persistent compilation cache: programs that a second process finds compiled."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_second_process(tmp_path):
    """All but programs over Auto axes, in which JAX writes down where in memory our function is."""

    def run() -> list[str]:
        tests = str(Path(__file__).parent)
        path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.splitlines()

    assert run() == ["one device False", "Auto False", "Explicit False", "shard_map False"]
    assert run() == ["one device True", "Auto False", "Explicit True", "shard_map True"]
