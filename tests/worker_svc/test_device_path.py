"""The path of a GPU from plan to tokens, with everything but the GPU: see `tests/worker_svc/interpreted`."""

from pathlib import Path

import pytest

from tests.interpreted import check_interpreted

pytest.importorskip("triton", reason="the kernels need triton to be interpreted")


@pytest.mark.every(3)
def test_the_device_path_computes_and_never_waits() -> None:
    """Interpreted kernels under the engine of a GPU give the oracle's tokens, and no step reads a value back."""
    check_interpreted(Path(__file__).parent / "interpreted" / "test_device_path.py")
