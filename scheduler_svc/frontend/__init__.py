"""The front ends: `link` encodes and decodes their frames, `hub` owns their ZeroMQ ROUTER."""
