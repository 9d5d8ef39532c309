"""How fast a product is: `python -m bench`. Times, never asserts; `tests/` asserts and never times."""
