"""The plots in docs/scheduling.md: `claims` defines workloads that the core runs in virtual time (`world`)."""
