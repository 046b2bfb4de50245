"""Schemathesis checks the API against its OpenAPI description and finds no violation and no crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from measure.testbed.service import serve
from tests.examples import FACTOR

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = 2 * FACTOR
"""Per operation, besides those that every boundary of the description gives."""


@pytest.mark.every(3)
def test_no_request_makes_a_server_error(tmp_path: Path) -> None:
    """No request drawn from the OpenAPI page gets a 5xx, and every answer has a documented status, type and form.

    Thousands of valid and invalid requests are drawn.
    """
    with serve("demo", "--max-model-len=96", "--default-max-tokens=8") as served:
        run = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"), "run", f"http://{served.http}/openapi.json",
                "--checks", CHECKS, "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", "1",
                # The description includes the deadline header, and a missed deadline returns 504 by design.
                "--header", "X-Request-Timeout: 600", "--request-timeout", "600", "--no-shrink",
                "--continue-on-failure",
            ],
            cwd=tmp_path,
            env={**os.environ, "NO_PROXY": "*", "no_proxy": "*"},
            capture_output=True,
            text=True,
        )  # fmt: skip

        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
