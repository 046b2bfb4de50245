"""`quire download`: a model from a hub becomes a folder as a whole, or not at all."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from measure.testbed.service import QUIRE
from shared.model_path import resolve_model
from tests.deploy.hub import Hub, serving

DEMO = resolve_model("demo", weights=True)
_WANTED = {".json", ".jinja", ".txt", ".model", ".safetensors"}


def _download(hub: Hub, folder: Path, *arguments: str, model: str = "org/tales", token: str = "") -> tuple[int, str]:
    """Return exit code and output."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.address, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "NO_PROXY": "*",
        "HOME": str(folder.parent), "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder.parent / "hub"),
    }  # fmt: skip
    done = subprocess.run(
        [*QUIRE, "download", model, str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_model_is_there_as_a_whole(tmp_path: Path) -> None:
    """The folder has the files that front ends and workers read, and is left alone the next time."""
    with serving(Hub({"org/tales": DEMO})) as hub:
        code, said = _download(hub, tmp_path / "tales")
        assert code == 0, said
        sent = hub.num_sent
        assert _download(hub, tmp_path / "tales")[0] == 0
        assert hub.num_sent == sent
    found = {path.relative_to(tmp_path / "tales"): path.read_bytes() for path in (tmp_path / "tales").rglob("*")}

    assert found == {
        path.relative_to(DEMO): path.read_bytes()
        for path in DEMO.iterdir()
        if path.suffix in _WANTED and path.is_file()
    }
    assert not (tmp_path / "tales.partial").exists()


def test_a_failed_download_leaves_no_folder(tmp_path: Path) -> None:
    """A gated model needs its token.

    A worker that starts during the download finds no model instead of a partial one.
    """
    with serving(Hub({"org/tales": DEMO}, token="gate")) as hub:
        code, said = _download(hub, tmp_path / "tales", token="wrong")
        assert (code, (tmp_path / "tales").exists()) == (1, False)
        assert said.count("\n") == 1, said
        assert _download(hub, tmp_path / "tales", token="gate")[0] == 0

    assert (tmp_path / "tales" / "config.json").is_file()


@pytest.mark.parametrize(
    ("model", "message"), [("org/none", "not available|neither"), ("tales", "not a hub id"), ("../x/y", "not a hub id")]
)
def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path, model: str, message: str) -> None:
    """The line names the model, and no folder is left."""
    with serving(Hub({"org/tales": DEMO})) as hub:
        code, said = _download(hub, tmp_path / "tales", model=model)

    assert code == 1
    assert said.count("\n") == 1, said
    assert re.search(message, said), said
    assert not (tmp_path / "tales").exists()
