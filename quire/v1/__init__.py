"""Generated code for the public API `quire.v1`; `protos/quire/v1` documents it."""
