"""Code shared by all `transformers` decoders, regardless of how their attention reaches the paged KV cache.

A forward hook on the class's base model records the last hidden states. A class without a base model generates tokens
but no embeddings.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from worker_svc.model.base import AttentionInputs, KVCache, KVShape
from worker_svc.model.recurrent import RowStates, StateCounts


class UnsuitableError(Exception):
    """The reason why a decoder cannot be served in one of the ways."""


class TransformersModel(ABC):
    """A decoder of `transformers` with a paged KV cache."""

    attention: str
    """Name of the attention function that the class calls."""

    def __init__(self, decoder: PreTrainedModel, kv_shapes: Sequence[KVShape]) -> None:
        self._decoder = decoder
        self._kv_shapes = tuple(kv_shapes)
        parameters = inspect.signature(decoder.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self.takes_positions = "position_ids" in parameters
        """Whether the class accepts token positions; otherwise it counts them."""
        self._hidden: torch.Tensor | None = None
        """Last hidden states of the running forward pass, `[rows, tokens, hidden_size]`."""
        self._hidden_size = 0
        if decoder.base_model is not decoder:
            self._hook = decoder.base_model.register_forward_hook(self._keep_hidden)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return self._kv_shapes

    @property
    def windows(self) -> tuple[int | None, ...]:
        return ()

    @property
    def state_bytes(self) -> int:
        return 0

    def allocate_states(self, counts: StateCounts, dtype: torch.dtype | None = None) -> None:
        """See `Model.allocate_states`; only a model with recurrent state has a type of it."""
        assert not self.state_bytes, "a model with recurrent state allocates it"

    @property
    def states(self) -> RowStates | None:
        return None

    @property
    def capturable(self) -> bool:
        """Return False, because only a trial shows whether a decoder of `transformers` supports capture."""
        return False

    @property
    def hidden_size(self) -> int:
        """See `Model.hidden_size`; known after the first step, which `load` computes."""
        return self._hidden_size

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> torch.Tensor:
        return self._run(input_ids, positions, attention, caches, logits_index)[0]

    def forward_hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor,
        hidden_index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = self._run(input_ids, positions, attention, caches, logits_index)
        assert hidden is not None, "a model without hidden states must have `hidden_size` 0"
        return logits, hidden[hidden_index]

    def discard(self) -> None:
        """Remove the hook from the decoder, which another model then uses."""
        if self._decoder.base_model is not self._decoder:
            self._hook.remove()

    @abstractmethod
    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits of `forward`, and the last hidden states of all tokens `[T, hidden_size]`.

        The whole class runs, including its head, so that its soft caps or logit scaling apply.
        """

    def _take_hidden(self) -> torch.Tensor | None:
        hidden, self._hidden = self._hidden, None
        return hidden

    def _keep_hidden(self, _module: torch.nn.Module, _inputs: object, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(hidden, torch.Tensor) and hidden.dim() == 3:
            self._hidden, self._hidden_size = hidden, hidden.shape[-1]
