"""Studies: `python scripts/study.py` lists them."""
