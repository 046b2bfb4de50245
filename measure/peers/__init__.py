"""Compares Quire with other CPU servers on one machine: `python -m measure.peers`."""
