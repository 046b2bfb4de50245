"""Promises of a test run: groups, the daily selection, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.selection import daily

ROOT = Path(__file__).resolve().parents[2]
WAITS = """
import os, signal, subprocess, sys, tempfile
import pytest

@pytest.fixture
def service():
    with tempfile.TemporaryDirectory(prefix="service-") as folder:
        command = (sys.executable, "-c", "import signal; print(flush=True); signal.pause()", folder)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        process.stdout.readline()
        yield

def test_passes():
    pass

def test_waits(service, tmp_path):
    assert os.environ["XDG_STATE_HOME"].startswith(os.environ["TMPDIR"])
    os.kill(int(os.environ["TESTED_RUN"] or os.getppid()), {signal})
    os.kill(os.getpid(), {signal})  # as a terminal does
    signal.pause()
"""
"""A test whose run is signalled while a fixture holds a process, which no tear-down ends, and a folder."""


def run(*arguments: str, environ: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments, without the variables of this test's own run."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        (sys.executable, *arguments),
        cwd=ROOT,
        env=inherited | {"QUIRE_SEED": "7"} | (environ or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.drawn(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("processes", ["0", "2"])
def test_an_interrupted_run_says_so_and_leaves_nothing(tmp_path: Path, number: signal.Signals, processes: str) -> None:
    """A signal ends a run, its processes and its temporary folders; the last line and the exit code show this."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    file = tmp_path / "test_waits.py"
    file.write_text(WAITS.replace("{signal}", str(int(number))))
    # In a parallel run, the test's process is a child of the run.
    program = "import os, sys, runpy; os.environ['TESTED_RUN'] = {}; sys.argv[0] = 'tests.run'; {}".format(
        "str(os.getpid())" if processes == "0" else "''", "runpy.run_module('tests.run', run_name='__main__')"
    )

    ended = run(
        "-c", program, "-n", processes, "-p", "tests.conftest", "-p", "no:cacheprovider", str(file),
        environ={"TMPDIR": str(folder), "PYTEST_DEBUG_TEMPROOT": str(tmp_path)},
    )  # fmt: skip

    assert ended.returncode == pytest.ExitCode.INTERRUPTED, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("INTERRUPTED, not all tests ran: 1 passed, 0 failed")
    assert list(folder.iterdir()) == []
    left = [process.cmdline() for process in psutil.process_iter() if str(folder) in " ".join(_arguments(process))]
    assert left == []


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_process_that_outlives_the_tests_fails_the_run(tmp_path: Path) -> None:
    """A run whose tests all pass but leave a process fails, names the process and ends it."""
    file = tmp_path / "test_leaves.py"
    program = "import signal; signal.pause()"
    file.write_text(
        textwrap.dedent(f"""
        import subprocess, sys

        def test_leaves():
            subprocess.Popen((sys.executable, "-c", {program!r}, {str(tmp_path)!r}), start_new_session=True)
        """)
    )

    ended = run("-m", "tests.run", "-p", "no:cacheprovider", str(file))

    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert f"processes outlived the tests:\n  {sys.executable} -c {program} {tmp_path}" in ended.stdout
    assert not [process for process in psutil.process_iter() if str(tmp_path) in _arguments(process)]


def test_tests_that_start_services_share_a_process(tmp_path: Path) -> None:
    """In a parallel run, one process executes all tests of a group; the other executes the rest."""
    log = tmp_path / "log"
    for name in ("tests/e2e/test_a", "tests/chaos/test_b", "tests/console/test_c", "tests/quire/test_d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).with_suffix(".py").write_text(
            textwrap.dedent(f"""
            import os
            import pytest

            @pytest.mark.parametrize("number", range(4))
            def test_says_where(number):
                with open({str(log)!r}, "a") as log:
                    print(os.environ["PYTEST_XDIST_WORKER"], {name!r}, file=log)
            """)
        )

    ended = run(
        "-m", "pytest", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "-p", "tests.conftest",
        "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path / "tests"),
    )  # fmt: skip

    assert ended.returncode == 0, ended.stdout
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) == 16
    with_services = {process for process, name in lines if name != "tests/quire/test_d"}
    others = {process for process, name in lines if name == "tests/quire/test_d"}
    assert len(with_services) == len(others) == 1
    assert with_services != others


def test_a_daily_run_draws_cases_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    """Tests marked release are omitted, as are all but the selected cases of a test marked drawn; the seed decides."""
    file = tmp_path / "test_cases.py"
    file.write_text(
        textwrap.dedent("""
        import pytest

        @pytest.mark.release
        def test_takes_long():
            pass

        @pytest.mark.drawn(2)
        @pytest.mark.parametrize("number", range(50))
        def test_cases(number):
            pass
        """)
    )

    outputs = {
        seed: run(
            "-m", "tests.run", "--daily", "-v", "-n", "2", "-p", "tests.conftest", "-p", "no:cacheprovider", str(file),
            environ={"QUIRE_SEED": str(seed)},
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip

    drawn = {seed: {line for line in output.splitlines() if "PASSED" in line} for seed, output in outputs.items()}
    assert [len(cases) for cases in drawn.values()] == [2, 2]
    assert {line.rpartition("::")[2] for line in drawn[1]} != {line.rpartition("::")[2] for line in drawn[2]}
    for output in outputs.values():
        assert "left out: 49 tests, which make test-all runs" in output
        assert "    48 x  " in output


def test_a_test_of_every_third_day_runs_in_one_of_three_successive_runs(tmp_path: Path) -> None:
    """Each day runs the same number of these tests, and in three days each of them runs once."""
    file = tmp_path / "test_days.py"
    test = "@pytest.mark.every(3)\ndef test_{}():\n    pass\n"
    file.write_text("import pytest\n\n" + "\n".join(test.format(name) for name in "abcdef"))

    outputs = [
        run(
            "-m", "tests.run", "--daily", "-v", "-p", "tests.conftest", "-p", "no:cacheprovider", str(file),
            environ={"QUIRE_SEED": str(seed)},
        ).stdout
        for seed in (20261129, 20261130, 20261131)
    ]  # fmt: skip

    days = [{line.split()[0] for line in output.splitlines() if "PASSED" in line} for output in outputs]
    assert [len(tests) for tests in days] == [2, 2, 2]
    assert len(set.union(*days)) == 6
    assert all("left out: 4 tests, which make test-all runs" in output for output in outputs)


def test_the_draw_follows_from_the_seed(request: pytest.FixtureRequest) -> None:
    """Both processes of a parallel run draw the same tests."""
    items = request.session.items

    assert daily(items, 1) == daily(items, 1)
