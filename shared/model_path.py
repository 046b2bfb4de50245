"""Location of a model's files: a bundled checkpoint, a local folder, or a hub id that is downloaded."""

from pathlib import Path

from shared.config import ConfigError

DEMO_MODEL = "demo"
"""Name of the checkpoint that ships with Quire."""
DEMO_DRAFT = "demo-draft"
"""Name of the draft model for `DEMO_MODEL`, which also ships with Quire."""

_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")
"""File names with these suffixes are not hub ids."""
_EMBEDDED = {DEMO_MODEL: "demo_model", DEMO_DRAFT: "demo_draft"}


def resolve_model(model: str, *, weights: bool) -> Path:
    """Return the local folder with the model's files; download them if necessary.

    Args:
        model: "demo", "demo-draft", a path, or a hub id ("org/name").
        weights: whether the weights are needed; a front end needs only the tokenizer.

    Raises:
        ConfigError: the folder does not exist, and the model cannot be downloaded from the hub.
    """
    if model in _EMBEDDED:
        return Path(__file__).parent / _EMBEDDED[model]
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model: {path} contains no config.json; use the folder of a Hugging Face checkpoint")
        return path
    if path.is_file():
        raise ConfigError(f"model: {model} is a file; specify its folder, with config.json and tokenizer.json in it")
    if path.suffix in _WEIGHTS:
        raise ConfigError(f"model: file {model} does not exist; use a checkpoint folder or a hub id")
    if path.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise ConfigError(f"model: folder {model} does not exist; use 'demo', a checkpoint folder or a hub id")
    return _from_hub(model, weights=weights)


def draft_of(model: str) -> str:
    """Return the name of the draft model bundled with `model`; empty if there is none."""
    return DEMO_DRAFT if model == DEMO_MODEL else ""


def served_name(model: str) -> str:
    """Return the default name under which `model` is served."""
    return model if model in _EMBEDDED or not Path(model).is_dir() else Path(model).resolve().name


def download(model: str, revision: str, folder: Path) -> None:
    """Download a hub model's files and weights into a folder; continue an interrupted download.

    Raises:
        ConfigError: the model cannot be downloaded from the hub.
        OSError: the folder cannot be written.
    """
    if model.count("/") != 1 or model.startswith(("/", ".")):
        raise ConfigError(f"model: {model!r} is not a hub id; use ORG/NAME")
    _from_hub(model, weights=True, revision=revision, folder=folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {model} has no config.json; use a checkpoint in the format of transformers")


def _from_hub(model: str, *, weights: bool, revision: str | None = None, folder: Path | None = None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.txt", "*.model"] + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(model, revision=revision, local_dir=folder, allow_patterns=patterns))
    # The hub client raises a dozen unrelated error types, most of which mean "not available".
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        detail = str(error).strip().splitlines()
        raise ConfigError(
            f"model: {model} is neither a local folder nor available from the hub"
            f" ({type(error).__name__}: {detail[0] if detail else ''})"
        ) from None
