"""GGUF models in several files, as llama.cpp's gguf-split writes them: NAME-00001-of-00003.gguf and so on.

Each file has tensors of its own and says which part of how many it is; the first one has all other keys.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAME = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def whole_of(path: Path) -> str:
    """A name that all parts of a model share, made from theirs; of any other file its own."""
    match = _NAME.fullmatch(path.name)
    return path.name if match is None else f"{match[1]}{match[3]}"


def parts_of(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """All files of the model that `path`, whose keys are given, is a part of: itself alone if it is whole.

    Raises ValueError if its name does not say what its keys say, and FileNotFoundError with what is missing.
    """
    count = metadata.get(_COUNT, 1)
    if type(count) is not int or not 1 <= count <= 99_999:
        raise error(path, _COUNT, "1 to 99999", count)
    if count == 1:
        return [path]
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise error(path, "the name of one part", f"NAME-00001-of-{count:05}.gguf, say", path.name)
    paths = [path.with_name(f"{match[1]}{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise FileNotFoundError(
            f"formats.open: {path}: all {count} parts must be in its folder; missing: {names}"
        )
    return paths


def check(files: Mapping[Path, tuple[Mapping[str, Any], Mapping[str, Any]]]):
    """Checks that keys and tensors of each part are those of its number, and that no tensor is in two."""
    places: dict[str, Path] = {}
    for number, (path, (metadata, tensors)) in enumerate(files.items()):
        for key, expected in ((_NO, number), (_COUNT, len(files))):
            if not _is(metadata.get(key), expected):
                raise error(path, key, f"{expected}, as its name says", metadata.get(key))
        for name in tensors:
            if name in places:
                raise error(path, f"tensor {name}", "in one part", f"another one in {places[name].name}")
            places[name] = path
    path, (metadata, _) = next(iter(files.items()))
    if not _is(metadata.get(_TENSORS, len(places)), len(places)):
        raise error(path, _TENSORS, f"{len(places)}, as many as all parts have", metadata[_TENSORS])


def _is(value: Any, number: int) -> bool:
    return type(value) is int and value == number


def error(path: Path, what: str, expected, got) -> ValueError:
    return ValueError(f"formats.open: {path}: {what} must be {expected}; got {str(got)[:80]}")
