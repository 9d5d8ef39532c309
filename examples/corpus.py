"""The text: source files of Python's standard library, read from the Python that runs this.

The standard library is distributed under the Python Software Foundation License Version 2, which
allows its use and redistribution; https://docs.python.org/3/license.html. Nothing of the text is
stored in this repository.
"""

import pathlib
import sysconfig

import numpy as np

LICENSE = (
    "Trained on the source files of Python's standard library, copyright (c) 2001 Python Software "
    "Foundation; all rights reserved; used under the PSF License Version 2."
)

# Never trained on. By name, so that the split is the same for every version of Python.
HELD_OUT = (
    *("argparse", "calendar", "configparser", "csv", "difflib", "fractions", "gzip", "heapq"),
    *("json", "queue", "sched", "shutil", "statistics", "textwrap", "tomllib", "zipapp"),
)

# Installed packages, and tables that only look like source code.
SKIP = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__", "entities.py"}


def files(root=None):
    """(root, relative path) of every source file."""
    root = pathlib.Path(root or sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIP.isdisjoint(name.parts) and path.stat().st_size < 500_000:
            yield root, name


def names(path):
    """The modules a file tells about: "test/test_json/test_dump.py" is about json and dump."""
    return {part.removesuffix(".py").removeprefix("test_").lstrip("_") for part in path.parts}


def train_text(root=None):
    """Every file that is not about a held-out module, as one array of bytes."""
    text = [(root / name).read_bytes() for root, name in files(root) if names(name).isdisjoint(HELD_OUT)]
    return np.frombuffer(b"\n\n".join(text), np.uint8)


def held_out_texts(root=None):
    """The bytes of each held-out module."""
    texts = {module: b"" for module in HELD_OUT}
    for folder, name in files(root):
        module = name.parts[0].removesuffix(".py")
        if module in texts:
            texts[module] += (folder / name).read_bytes()
    return {module: np.frombuffer(text, np.uint8) for module, text in texts.items()}


def held_out_windows(context, stride, per_module=8, root=None):
    """Overlapping windows of held-out text, (windows, context + 1) bytes.

    Score the last `stride` bytes of each: then every scored byte has at least `context - stride`
    bytes before it, and none is scored twice. They come from the middle of each module.
    """
    windows = []
    for text in held_out_texts(root).values():
        views = np.lib.stride_tricks.sliding_window_view(text, context + 1)[::stride]
        first = max(0, (len(views) - per_module) // 2)
        windows.append(views[first : first + per_module])
    return np.concatenate(windows)
