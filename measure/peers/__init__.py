"""Quire and other CPU servers on one machine, in turn: `python -m measure.peers`."""
