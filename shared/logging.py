"""Structured logs: JSON lines, or a readable console form when a person is watching.

Every line carries trace_id and span_id of the current span when there is one. Nothing of a prompt or of an output is
ever logged; that is for the callers to keep.
"""

import logging
import os
import sys

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger


def configure_logging(service: str, level: str = "info") -> None:
    """Sets up structlog for this process; lines go to stderr, so that stdout stays for what a command answers."""
    as_console = sys.stderr.isatty() and os.environ.get("QUIRE_LOG_FORMAT", "auto") != "json"
    renderer = structlog.dev.ConsoleRenderer() if as_console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_span,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, pid=os.getpid())
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")


def get_logger() -> FilteringBoundLogger:
    """The process's logger."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def _add_span(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event
