"""The plots of docs/scheduling.md: workloads (`claims`) that the core runs in virtual time (`world`)."""
