"""What measurements, checks and tests start and compare: services, tiny checkpoints, environments of other programs."""
