"""Tests of HTTP on the front end."""
