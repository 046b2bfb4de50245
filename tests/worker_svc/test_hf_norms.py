"""Native RMSNorm in decoders of `transformers`: modules are recognised by their results."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.lfm2.modeling_lfm2 import Lfm2RMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from kernels.native.serving import native
from tests.kernels.rounding import assert_rounded_alike
from worker_svc.model.hf_norms import NativeNorm, use_native_norms

CLASSES = [Gemma3RMSNorm, GptOssRMSNorm, Lfm2RMSNorm, Olmo2RMSNorm, Phi3RMSNorm, Qwen3NextRMSNorm, T5LayerNorm]
DIM = 96

pytestmark = pytest.mark.skipif(native() is None, reason="the native CPU kernels are not available")


class _ShiftedNorm(torch.nn.Module):
    """An RMSNorm of an unknown kind: its weight has the offset 0.9."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(DIM)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * (0.9 + self.weight)).to(x.dtype)


def _replaced(module: torch.nn.Module, dtype: torch.dtype) -> int:
    kernels = native()
    assert kernels is not None
    with torch.inference_mode():
        return use_native_norms(torch.nn.ModuleList([module]), dtype, kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CLASSES)
def test_each_kind_is_recognised(kind: type[torch.nn.Module], dtype: torch.dtype) -> None:
    """The norms of these classes are replaced, and return what the class returns, for any shape and size."""
    module = kind(DIM, eps=1e-5).to(dtype)
    with torch.no_grad():
        module.get_parameter("weight").normal_()
    x = (torch.randn(3, 40, 4, DIM) * torch.tensor([1e-3, 1.0, 30.0])[:, None, None, None]).to(dtype)
    expected = module(x)

    assert _replaced(module, dtype) == 1
    assert isinstance(module.forward, NativeNorm)
    assert_rounded_alike(module(x), expected)


def test_the_vectors_may_be_a_keyword_argument() -> None:
    """A decoder may call its norms by the name of their parameter, which differs between classes."""
    module, x = Phi3RMSNorm(DIM), torch.randn(3, DIM)
    expected = module(hidden_states=x)

    assert _replaced(module, torch.float32) == 1
    assert_rounded_alike(module(hidden_states=x), expected)


@pytest.mark.parametrize("kind", CLASSES)
def test_trained_weights_of_one_are_recognised(kind: type[torch.nn.Module]) -> None:
    """A new module, whose weights have their initial values, is replaced, too."""
    assert _replaced(kind(DIM, eps=1e-6).bfloat16(), torch.bfloat16) == 1


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.LayerNorm(DIM),
        torch.nn.Linear(DIM, DIM),
        MambaRMSNormGated(DIM, group_size=DIM),  # type: ignore[no-untyped-call]
        Phi3RMSNorm(DIM + 8),
        _ShiftedNorm(),
    ],
    ids=["layer norm", "linear", "gated", "odd size", "unknown offset"],
)
def test_other_modules_remain(module: torch.nn.Module) -> None:
    """A module of another kind, or of a size that the kernel does not support, keeps its forward pass."""
    assert _replaced(module.bfloat16(), torch.bfloat16) == 0
    assert not isinstance(module.forward, NativeNorm)


def test_other_dtypes_use_the_class() -> None:
    """Vectors with another dtype than the activations are computed by the class."""
    module = Phi3RMSNorm(DIM).bfloat16()
    x = torch.randn(5, DIM)
    expected = module(x)
    _replaced(module, torch.bfloat16)

    assert torch.equal(module(x), expected)
