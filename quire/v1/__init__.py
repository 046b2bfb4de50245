"""Generated code of the public API `quire.v1`; the proto files in `protos/quire/v1` are its documentation."""
