"""A small block of Flax NNX layers, of every kind that is quantised but Embed."""

import warnings

with warnings.catch_warnings():
    # Flax 0.12.0, the newest for jax 0.8.0, warns as it loads.
    warnings.filterwarnings("ignore", "jax.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
    from flax import nnx

D, F = 64, 96
ROUNDING = {"bits": 8, "group_size": 32, "method": "minmax"}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.q = nnx.Einsum("btd,dnh->btnh", (D, 4, 16), (4, 16), rngs=rngs)
        self.o = nnx.Einsum("btnh,nhd->btd", (4, 16, D), rngs=rngs)
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.LinearGeneral(F, D, rngs=rngs)
        self.norm = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(self.o(self.q(x))))))
