"""Quantised Flax layers: import `jaxgemv.flax.linen` or `jaxgemv.flax.nnx`, each of which imports Flax."""
