"""How many random examples a property gets: few as a test, always the same; many and new ones as a search.

JAXGEMV_EXAMPLES=2000 pytest tests/test_properties.py tests/test_properties_whole.py
"""

import os

from hypothesis import settings

_ASKED = os.environ.get("JAXGEMV_EXAMPLES")
few = settings(max_examples=int(_ASKED or 16), derandomize=not _ASKED, deadline=None, database=None)
