"""Measurements of the whole served stack, as a client sees it."""
