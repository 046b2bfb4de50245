"""The packages that each process loads at start. Imports take most of the time and memory of a start.

A process may load less than its list, because some packages load others only where they are installed.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LOGS = {"structlog", "rich", "pygments", "attr", "greenlet", "opentelemetry", "typing_extensions"}
"""What the logger and the tracer load."""
_LINKS = {"zmq", "psutil", "google", "numpy"}
"""What the sockets and the messages of the links load."""
_SUPERVISOR: set[str] = set()
_SCHEDULER = _LOGS | _LINKS | {"msgpack", "prometheus_client"}
_FRONTEND = (
    _LOGS
    | _LINKS
    | {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "smg_grpc_proto", "prometheus_client"}
    | {"starlette", "anyio", "sniffio", "uvicorn", "uvloop", "httptools", "click", "h11", "idna"}
    | {"pydantic", "pydantic_core", "annotated_types", "typing_inspection", "jiter", "jinja2", "markupsafe"}
    | {"tokenizers", "llguidance"}
)
_WORKER = _LOGS | _LINKS | {"torch", "torchgen", "tqdm", "safetensors", "llguidance"}

_LOADED = """
import sys
before = set(sys.modules)
{program}
names = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(name for name in names - sys.stdlib_module_names if not name.startswith("_")))
"""
SERVE_DEMO = """
from worker_svc import main
from shared.model_path import resolve_model
from checks.driver import Driver, make_engine
assert len(Driver(make_engine(resolve_model("demo", weights=True))).generate([5, 6, 7], 3)) == 3
"""


def loaded_by(program: str) -> set[str]:
    """The packages, except Python's own, that a program loads in a separate process."""
    process = subprocess.run(
        [sys.executable, "-c", _LOADED.format(program=program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return set(process.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("program", "own", "foreign"),
    [
        ("import quire_server.cli.serve, quire_server.serve.foreground", {"quire_server"}, _SUPERVISOR),
        ("import scheduler_svc.main", {"scheduler_svc", "quire"}, _SCHEDULER),
        ("import services.frontend", {"services", "quire"}, _FRONTEND),
        (SERVE_DEMO, {"worker_svc", "kernels", "checks", "tests"}, _WORKER),
    ],
    ids=["the supervisor before it starts the others", "scheduler", "front end", "worker that serves the demo model"],
)
def test_a_process_loads_only_these_packages(program: str, own: set[str], foreign: set[str]) -> None:
    """No process loads a package outside its list; a CPU worker loads neither transformers nor triton."""
    ours = {"shared", "protos"} | own

    # torch imports pynvml (nvidia-ml-py) if it is installed.
    assert loaded_by(program) - ours <= foreign | {"cython_runtime", "pynvml"}


def test_transformers_is_loaded_for_a_model_that_runs_through_it(tmp_path: Path) -> None:
    """A configuration that `config_reader` cannot read is read by transformers."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    program = f"""
from pathlib import Path
from worker_svc.model.config import read_config
from worker_svc.model.config_reader import read_own
assert read_own(Path({str(tmp_path)!r})) is None
print(read_config(Path({str(tmp_path)!r})).model_type)
"""

    assert "transformers" in loaded_by(program)


FIRST_LINE = """
import os, sys
class Watched:
    def write(self, text):
        slow = [name for name in ("asyncio", "structlog", "ssl", "grpc", "numpy") if name in sys.modules]
        os.write(1, f"{text.strip()}|{slow}".encode())
        os._exit(0)
    def flush(self): pass
sys.stderr = Watched()
from quire_server.cli.main import main
main(["serve", "--model", "demo", "--show-sample", "--grpc-port", "0", "--http-port", "0"])
"""


def test_make_run_says_what_it_waits_for_before_anything_slow() -> None:
    """`quire serve --show-sample` first prints one line on stderr, before it imports a slow package or starts one."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINE], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "starting quire: loading model demo|[]"
