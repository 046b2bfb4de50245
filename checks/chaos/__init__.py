"""Faults, overload and malformed frames against running services, as programs and for tests/chaos."""
