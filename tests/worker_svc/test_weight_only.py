"""Models whose weights stay quantised on a GPU: see `tests/worker_svc/interpreted`."""

from pathlib import Path

import pytest

from tests.interpreted import check_interpreted

pytest.importorskip("triton", reason="the kernels need triton to be interpreted")


@pytest.mark.every(3)
def test_models_with_quantised_weights_equal_models_with_dequantised_weights() -> None:
    """Each layout, loaded and computed by interpreted kernels, and the memory that `quire capacity` predicts."""
    check_interpreted(Path(__file__).parent / "interpreted" / "test_weight_only.py")
