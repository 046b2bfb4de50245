"""Scheduler service: `core/` makes all decisions; the other modules do its I/O.

core            the scheduler as a pure state machine (no socket, clock, thread or torch)
service         the loop: passes events to the core, and sends its effects and plans
frontend        the link to the front ends: its ZeroMQ ROUTER and its frames; worker: the same for workers
journal         stores resumable requests on disk
cache_changes   changes of the prefix caches; kv_events: reports them to endpoint pickers
live_views      streams of steps, queues and blocks to operators who watch
operator        requests of operators; metrics, tracing: Prometheus metrics and OpenTelemetry spans
admission_file  reads limits of tenants and request classes
assembly        builds the parts of the service from the configuration
main            the process; collector: settings of its garbage collector
recorder        writes the flight record; explanations: starts processes that answer questions about it
"""
