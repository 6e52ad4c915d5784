"""Entry points: one file per stage, run as `python -m scripts.NAME`."""
