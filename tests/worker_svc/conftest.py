"""One torch thread: tiny tensors gain nothing from more, and several test processes may share two cores."""

import torch

torch.set_num_threads(1)
