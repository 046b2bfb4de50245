"""The operator API, generated code by version."""
