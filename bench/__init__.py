"""How fast a product is: `python -m bench`. Times, never asserts; `tests/` asserts and never times."""

try:
    import jaxgemv  # noqa: F401
except ImportError as error:  # one line that says what to do
    raise SystemExit(f"bench: {error}") from None
