"""Operator API: generated code by version."""
