"""The layers and the function that `jaxgemv.flax.nnx` offers."""
