"""Checkpoints that people have, as `QuantizedTensor`s: `jaxgemv.formats.open(path)`."""

from jaxgemv.formats._checkpoint import Checkpoint as Checkpoint
from jaxgemv.formats._open import open as open
