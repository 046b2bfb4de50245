"""Array types of plans and results."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

NO_ROWS: IntArray = np.zeros(0, np.int64)
NO_IDS: Int32Array = np.zeros(0, np.int32)
"""Empty column, shared by all plans because most columns of most plans are empty."""
for _empty in (NO_ROWS, NO_IDS):
    _empty.setflags(write=False)
