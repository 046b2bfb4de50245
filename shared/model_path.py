"""Where a model's files are: the embedded checkpoint, a local folder, or a hub id that is fetched to a local folder."""

from pathlib import Path

from shared.config import ConfigError

DEMO_MODEL = "demo"
"""The name of the checkpoint that ships with Quire."""


def resolve_model(model: str, *, weights: bool) -> Path:
    """The local folder with the files of `model`.

    Args:
        model: "demo", a path, or a hub id ("org/name").
        weights: whether the weights are needed too; a front end needs only the tokenizer.

    Raises:
        ConfigError: no such folder, and the hub does not know it or cannot be reached.
    """
    if model == DEMO_MODEL:
        return Path(__file__).parent / "demo_model"
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model: {path} holds no config.json; give the folder of a Hugging Face checkpoint")
        return path
    if path.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise ConfigError(f"model: there is no folder {model}; give 'demo', a checkpoint folder or a hub id")
    return _from_hub(model, weights=weights)


def served_name(model: str) -> str:
    """The default name under which `model` is served."""
    return model if model == DEMO_MODEL or not Path(model).is_dir() else Path(model).resolve().name


def _from_hub(model: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.txt", "*.model"] + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean "not to be had"
        detail = str(error).strip().splitlines()
        raise ConfigError(
            f"model: {model} is neither a local folder nor to be had from the hub"
            f" ({type(error).__name__}: {detail[0] if detail else ''})"
        ) from None
