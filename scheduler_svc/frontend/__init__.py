"""Connection to the front ends: `link` encodes and decodes frames, `hub` owns the ZeroMQ ROUTER socket."""
