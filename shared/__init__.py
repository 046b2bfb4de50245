"""What every process needs: configuration, columns, sockets, telemetry, logging, errors. Imports no service."""
