"""Promises that the core is known not to keep yet: seen, counted, and not held against a simulation.

An entry is a check's name and why it is here. The list is meant to be empty; a campaign prints how often each was seen.
"""

KNOWN: dict[str, str] = {}
