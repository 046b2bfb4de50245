"""Downloads a model from the hub into a folder, which then exists as a whole or not at all.

A token for gated models is read from the variable HF_TOKEN, the address of another hub from HF_ENDPOINT. An interrupted
download continues where it stopped. A folder that is already there is left as it is.
"""

import shutil
from pathlib import Path

from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser
from shared.config import ConfigError
from shared.model_path import download

EXAMPLES = """
  quire download Qwen/Qwen3-0.6B /models/qwen3-0.6b
  HF_TOKEN=… quire download meta-llama/Llama-3.1-8B-Instruct /models/llama --revision 0e9e39f249a1
"""
_PARTIAL = ".partial"


def configure(parser: OneLineParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", metavar="ORG/NAME", help="the model's id on the hub")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder for its files; must not exist")
    parser.add_argument("--revision", default="main", metavar="NAME", help="branch, tag or commit (default: main)")


def run(options: Namespace) -> int:
    """Download the model, then give the folder its name."""
    folder: Path = options.folder
    if (folder / "config.json").is_file():
        print(f"{folder}: exists already; nothing to download")
        return 0
    if folder.exists():
        raise ConfigError(f"folder: {folder} exists but contains no model; choose a new folder")
    partial = folder.with_name(folder.name + _PARTIAL)
    try:
        download(options.model, options.revision, partial)
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # The hub client stores its state in this folder.
        partial.rename(folder)
    except OSError as error:
        raise CommandError(f"{partial}: {error.strerror or error}; free disk space, or choose another folder") from None
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {options.model}, {size / 1e9:.2f} GB")
    return 0
