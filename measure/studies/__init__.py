"""Comparisons for the documentation, one program each."""
