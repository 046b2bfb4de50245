"""Structured logs: JSON lines, or a readable console form when a person is watching.

Every line says which service and process wrote it, and carries trace_id and span_id of the current span when there is
one. What concerns a request carries `request_id`, what concerns a step `epoch` and `step`. Nothing of a prompt or of an
output is ever logged; that is for the callers to keep.

What libraries log and warn about, from the level of a warning on, comes out in the same form, with `logger` saying
whose it is: see `adopt_libraries` for those that insist on a form of their own.
"""

import logging
import os
import sys

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LEVELS = ("debug", "info", "warning", "error")
"""From the most lines to the fewest."""

_lowest = "info"
"""Lines below this level are left out."""


def configure_logging(service: str, level: str = "info") -> None:
    """Sets up logging for this process; lines go to stderr, so that stdout stays for what a command answers.

    Args:
        service: who the lines are from, by the name that its spans have.
        level: Quire's own lines below it are left out.
    """
    as_console = sys.stderr.isatty() and os.environ.get("QUIRE_LOG_FORMAT", "auto") != "json"
    renderer: Processor = structlog.dev.ConsoleRenderer() if as_console else structlog.processors.JSONRenderer()
    process = {"service": service, "pid": os.getpid()}

    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        # Not a context variable: threads that libraries start have a context of their own.
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
        # Which lines are left out may change; loggers are kept from their first use on.
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
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
    """From now on the process's own lines below `level`, one of `LEVELS`, are left out; returns the level before."""
    global _lowest
    if level not in LEVELS:
        raise ValueError(f"{level!r} is none of {', '.join(LEVELS)}")
    before, _lowest = _lowest, level
    return before


def adopt_libraries() -> None:
    """Takes from libraries the handlers that they brought for stderr, so that their lines come out as all others do.

    To be called again after an import that brings such a library (torch, transformers).
    """
    for logger in list(logging.root.manager.loggerDict.values()):
        if not isinstance(logger, logging.Logger):
            continue
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout):
                logger.removeHandler(handler)
                logger.propagate = True


def get_logger() -> FilteringBoundLogger:
    """The process's logger."""
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
