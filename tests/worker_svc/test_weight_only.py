"""Models whose weights stay quantised on a GPU: see `tests/worker_svc/interpreted`."""

from pathlib import Path

import pytest

from tests.interpreted import check_interpreted

pytest.importorskip("triton", reason="the kernels need triton to be interpreted")


FOLDER = Path(__file__).parent / "interpreted"
FILES = [FOLDER / "test_weight_only.py", FOLDER / "test_quantised_features.py"]


@pytest.mark.every(3)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_models_with_quantised_weights_equal_models_with_dequantised_weights(file: Path) -> None:
    """Each layout, loaded and computed by interpreted kernels, and the memory that `quire capacity` predicts.

    Some layouts are combined with speculation, swapping, tensor parallelism and quantised KV.
    """
    check_interpreted(file)


@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_other_layouts_equal_their_dequantised_weights(file: Path) -> None:
    """The same for the other layouts, and for every layout with every value of each feature."""
    check_interpreted(file, "release", limit_s=3600)
