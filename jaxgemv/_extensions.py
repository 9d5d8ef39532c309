"""In a checkout, where the compiled extensions are: an install of the same version, plain or editable.

`python -c "import jaxgemv"` and `python -m bench` in a checkout find the Python files there, beside which nothing is
compiled. An editable install knows where the extensions lie. A plain one of the same version lends them; without either
there is nothing to run, and the message says what to do. Nothing here needs what may not be installed.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

_CHECKOUT = Path(__file__).parent.parent


def _find() -> None:
    if not (_CHECKOUT / "csrc").is_dir() or importlib.util.find_spec("jaxgemv._cpu"):
        return
    import tomllib  # which takes a while, and is for checkouts alone

    version = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    others = ""
    for installed in importlib.metadata.distributions(name="jaxgemv"):
        folder = Path(str(installed.locate_file("jaxgemv")))
        if folder.parent.resolve() == _CHECKOUT.resolve():
            continue  # what a build has left behind
        if installed.version == version:
            sys.modules["jaxgemv"].__path__.append(str(folder))
            return
        others = f" of version {version}, and {installed.version} is installed"
    raise ImportError(
        f"jaxgemv: this is the source tree{others}, and its extensions are not built: run  pip install -e {_CHECKOUT}"
    )


_find()
