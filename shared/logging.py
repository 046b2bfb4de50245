"""Structured logs: JSON lines, or a readable form on a terminal.

Every line contains the service and the process that wrote it, and the current span's trace_id and span_id, if any.
Lines about a request contain `request_id`; lines about a step contain `epoch` and `step`. Callers must ensure that
prompts and outputs are never logged.

Log lines from libraries with at least level warning have the same form, with the library's name in `logger`. For
libraries that install their own handlers, see `adopt_libraries`.
"""

import logging
import os
import sys

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LEVELS = ("debug", "info", "warning", "error")
"""Log levels, from the most verbose to the least verbose."""

_lowest = "info"
"""Current log level; lines below it are dropped."""


def configure_logging(service: str, level: str = "info") -> None:
    """Configure this process's logging to stderr, because stdout is for command output.

    Args:
        service: name of the service, as in its spans.
        level: lowest level of Quire's own lines.
    """
    as_console = sys.stderr.isatty() and os.environ.get("QUIRE_LOG_FORMAT", "auto") != "json"
    renderer: Processor = structlog.dev.ConsoleRenderer() if as_console else structlog.processors.JSONRenderer()
    process = {"service": service, "pid": os.getpid()}

    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        # A global instead of a context variable, because threads of libraries have their own context.
        return {**process, **event}

    set_level(level)
    processors: list[Processor] = [
        _drop_below,
        structlog.contextvars.merge_contextvars,
        add_process,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_span,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*processors, renderer],
        # Filter in a processor, because loggers are cached on first use and the level may change later.
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        # Write each line with one call, so that lines from processes with a shared log file are not interleaved.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_add_library, *processors[1:]],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    adopt_libraries()


def set_level(level: str) -> str:
    """Set the log level, one of `LEVELS`; return the previous one."""
    global _lowest
    if level not in LEVELS:
        raise ValueError(f"level: unknown value {level!r}; use one of {', '.join(LEVELS)}")
    before, _lowest = _lowest, level
    return before


def adopt_libraries() -> None:
    """Remove the stderr handlers that libraries installed, so that their lines have the common form.

    Call this function again after importing such a library (torch, transformers).
    """
    for logger in list(logging.root.manager.loggerDict.values()):
        if not isinstance(logger, logging.Logger):
            continue
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout):
                logger.removeHandler(handler)
                logger.propagate = True


def get_logger() -> FilteringBoundLogger:
    """Return the process's logger."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def _drop_below(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if method in LEVELS and LEVELS.index(method) < LEVELS.index(_lowest):
        raise structlog.DropEvent
    return event


def _add_library(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event["logger"] = event["_record"].name
    return event


def _add_span(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event
