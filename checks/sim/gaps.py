"""Promises that the core is known to break: they are counted, and do not fail a simulation.

An entry is the name of a check and the reason for the entry. The list is normally empty. A campaign prints how often
each entry was seen.
"""

KNOWN: dict[str, str] = {}
