"""Every line in the log of a process has the same form, whichever library wrote it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BEGIN = "from shared.logging import adopt_libraries, configure_logging, get_logger\nconfigure_logging('quire-test')\n"


def lines_of(program: str) -> list[dict[str, Any]]:
    """What a program that begins with `configure_logging` writes to stderr, line by line."""
    process = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        cwd=ROOT,
        env=os.environ | {"QUIRE_LOG_FORMAT": "json"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == ""
    return [json.loads(line) for line in process.stderr.splitlines()]


def test_a_log_line_names_its_source_and_time() -> None:
    """Time, level, service and process id are in every line, beside the caller's fields."""
    (line,) = lines_of("get_logger().info('hello', request_id='r', step=3)")

    assert (line["event"], line["request_id"], line["step"]) == ("hello", "r", 3)
    assert (line["level"], line["service"]) == ("info", "quire-test")
    assert isinstance(line["pid"], int)
    assert line["timestamp"].endswith("Z")


def test_a_log_line_is_written_at_once() -> None:
    """No line is torn where several processes write to one file, also without buffers as in many containers.

    Each read from a pipe of packets returns what one write wrote.
    """
    reading, writing = os.pipe2(os.O_DIRECT)
    with os.fdopen(reading, "rb", buffering=0) as packets:
        with os.fdopen(writing, "wb") as stderr:
            program = "import logging; get_logger().info('own'); logging.getLogger('lib').warning('other')"
            environment = os.environ | {"QUIRE_LOG_FORMAT": "json", "PYTHONUNBUFFERED": "1"}
            command = [sys.executable, "-c", BEGIN + program]
            subprocess.run(command, cwd=ROOT, env=environment, stderr=stderr, timeout=120, check=True)
        written = list(iter(lambda: packets.read(4096), b""))

    assert [json.loads(packet)["event"] for packet in written] == ["own", "other"]
    assert all(packet.endswith(b"\n") for packet in written)


def test_the_level_may_change_at_any_time() -> None:
    """Existing loggers follow the new level, which does not affect library messages."""
    program = (
        "import logging\nfrom shared.logging import set_level\nlog = get_logger()\n"
        "log.debug('1'); log.info('2'); set_level('debug')\n"
        "log.debug('3'); set_level('error'); log.warning('4'); log.error('5')\n"
        "logging.getLogger('lib').warning('6')"
    )

    assert [line["event"] for line in lines_of(program)] == ["2", "3", "5", "6"]


@pytest.mark.parametrize(
    ("program", "logger", "event"),
    [
        ("import logging; logging.getLogger('grpc._server').error('no %s', 'port')", "grpc._server", "no port"),
        ("import warnings; warnings.warn('old')", "py.warnings", "UserWarning: old"),
        (
            "import logging, threading\n"
            "t = threading.Thread(target=lambda: logging.getLogger('lib').warning('x')); t.start(); t.join()",
            "lib",
            "x",
        ),
        (
            "import logging, sys\nlib = logging.getLogger('lib')\n"
            "lib.addHandler(logging.StreamHandler()); lib.propagate = False\n"
            "adopt_libraries(); logging.getLogger('lib.part').warning('x')",
            "lib.part",
            "x",
        ),
    ],
    ids=["stdlib", "warning", "other thread", "library with a handler of its own"],
)
def test_libraries_lines_have_the_same_form(program: str, logger: str, event: str) -> None:
    """The standard library's logging and warnings come out once, as JSON, with the library's name."""
    (line,) = lines_of(program)

    assert line["logger"] == logger
    assert event in line["event"]
    assert {"level", "service", "pid", "timestamp"} <= line.keys()


def test_an_exception_is_one_line() -> None:
    """The traceback is part of the line, for our own lines and for libraries'."""
    raising = "try:\n  1 / 0\nexcept ZeroDivisionError:\n  "
    ours, theirs = lines_of(
        f"{raising}get_logger().error('a', exc_info=True)\nimport logging\n{raising}logging.exception('b')"
    )

    assert (ours["event"], theirs["event"]) == ("a", "b")
    assert "ZeroDivisionError" in ours["exception"]
    assert "ZeroDivisionError" in theirs["exception"]


def test_libraries_say_nothing_below_a_warning() -> None:
    """Whatever level a library gave itself."""
    assert lines_of("import logging; lib = logging.getLogger('lib'); lib.setLevel(10); lib.info('x')") == []


def test_transformers_and_torch_are_libraries_like_others() -> None:
    """They install their own handlers and formats, which a worker removes."""
    pytest.importorskip("transformers")
    program = (
        "import torch, transformers\nadopt_libraries()\nimport logging\n"
        "transformers.utils.logging.get_logger('transformers.models').warning('a')\n"
        "logging.getLogger('torch.fx').warning('b')"
    )

    assert [(line["logger"], line["event"]) for line in lines_of(program)] == [
        ("transformers.models", "a"),
        ("torch.fx", "b"),
    ]


def test_transformers_is_a_library_like_others_when_a_worker_imports_it_late(tmp_path: Path) -> None:
    """A worker imports it only to read the config.json of a model that runs through it."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    program = (
        "from pathlib import Path\nfrom worker_svc.model.config import read_config\n"
        f"read_config(Path({str(tmp_path)!r}))\n"
        "import transformers\ntransformers.utils.logging.get_logger('transformers.models').warning('a')"
    )

    assert [(line["logger"], line["event"]) for line in lines_of(program)] == [("transformers.models", "a")]


def test_a_line_within_a_span_names_it() -> None:
    """A line can be found from its trace, and the trace from the line."""
    program = (
        "from opentelemetry import trace\n"
        "context = trace.SpanContext(trace_id=7, span_id=9, is_remote=False)\n"
        "with trace.use_span(trace.NonRecordingSpan(context)):\n"
        "  get_logger().info('x')"
    )
    (line,) = lines_of(program)

    assert (line["trace_id"], line["span_id"]) == (f"{7:032x}", f"{9:016x}")
