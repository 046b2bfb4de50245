"""Tests of the explanation of slow requests."""
