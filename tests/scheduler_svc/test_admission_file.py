"""The admission file: its content reaches the core, and its mistakes are named."""

from pathlib import Path

import pytest

from scheduler_svc.admission_file import NO_SETTINGS, load_admission
from scheduler_svc.core.interface.config import RequestClass, TenantLimits
from shared.config import ConfigError


def _load(folder: Path, text: str) -> object:
    path = folder / "admission.toml"
    path.write_text(text, encoding="utf-8")
    return load_admission(str(path))


def test_settings_are_read(tmp_path: Path) -> None:
    """`default` stands for tenants that are not named."""
    path = tmp_path / "admission.toml"
    path.write_text(
        "[tenants.acme]\nweight = 2.5\nmax_running = 3\n[tenants.default]\nmax_queued = 4\ntokens_per_s = 10\n"
        '[classes.chat]\npolicy = "edf"\nweight = 3\n[classes.bulk]\npolicy = "sjf"\n',
        encoding="utf-8",
    )
    settings = load_admission(str(path))
    assert settings.tenant_limits == {
        "acme": TenantLimits(max_running=3),
        "": TenantLimits(max_queued=4, tokens_per_s=10),
    }
    assert settings.tenant_weights == {"acme": 2.5}
    assert settings.classes == {"chat": RequestClass(policy="edf", weight=3), "bulk": RequestClass(policy="sjf")}


def test_no_file_is_no_settings() -> None:
    """The setting's default."""
    assert load_admission("") is NO_SETTINGS


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[tenants.a]\nmax_runing = 1", "max_runing"),
        ("[tenants.a]\nmax_running = 1.5", "tenants.a.max_running"),
        ("[tenants.a]\nmax_running = -1", "tenants.a.max_running"),
        ("[tenants.a]\ntokens_per_s = nan", "tenants.a.tokens_per_s"),
        ('[tenants.a]\nweight = "much"', "tenants.a.weight"),
        ("[tenants.a]\nweight = true", "tenants.a.weight"),
        ("tenants = 3", "tenants"),
        ("[classes.a]\nweight = 2", "classes.a.policy"),
        ("[klasses.a]", "klasses"),
        ("not toml", "admission.toml"),
    ],
)
def test_an_invalid_entry_is_named(tmp_path: Path, text: str, names: str) -> None:
    """The error is one line with the file, the entry and the remedy."""
    with pytest.raises(ConfigError, match=rf"--admission-file.*{names}") as caught:
        _load(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message contains the path."""
    with pytest.raises(ConfigError, match="absent"):
        load_admission(str(tmp_path / "absent"))
