"""Connection to the workers: `link` encodes and decodes frames, `hub` owns the ZeroMQ ROUTER socket."""
