"""Runs side by side: a table and a picture."""
