"""A sweep's record is this user's, word for word, or it is refused."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcpbench.config.errors import ConfigError
from dcpbench.sweep import manifest

RECORD = manifest.Record(["parallel=ddp"], "/", ["a"], [])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_changed_record_is_foreign(tmp_path: Path, home: Path) -> None:
    RECORD.write(tmp_path)
    manifest.read(tmp_path).refuse_foreign(tmp_path)
    key = home / "dcpbench" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    written = json.loads((tmp_path / "sweep.json").read_text())
    for name, other in [
        ("arguments", ["parallel=ddp", "model.target=evil.Model"]),
        ("cwd", "/tmp"),
        ("cells", ["a", "b"]),
        ("storage", ["/"]),
        ("signature", None),
        ("signature", 3),
        ("signature", "\u00e9" * 64),
    ]:
        (tmp_path / "sweep.json").write_text(json.dumps({**written, name: other}))
        with pytest.raises(ConfigError, match="trust=true"):
            manifest.read(tmp_path).refuse_foreign(tmp_path)
    (tmp_path / "sweep.json").write_text(json.dumps(written))
    manifest.read(tmp_path).refuse_foreign(tmp_path)
    key.write_bytes(bytes(32))
    with pytest.raises(ConfigError, match="trust=true"):
        manifest.read(tmp_path).refuse_foreign(tmp_path)


def test_record_without_a_key_is_foreign(tmp_path: Path, home: Path) -> None:
    home.write_text("no folder")
    RECORD.write(tmp_path)
    with pytest.raises(ConfigError, match="trust=true"):
        manifest.read(tmp_path).refuse_foreign(tmp_path)


def test_concurrent_drivers_make_one_key(home: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(manifest.sign, [b"a"] * 8))) == 1
    assert [path.name for path in (home / "dcpbench").iterdir()] == ["key"]


def test_linked_or_short_key_signs_nothing(home: Path, tmp_path: Path) -> None:
    (home / "dcpbench").mkdir(parents=True)
    (tmp_path / "theirs").write_bytes(bytes(32))
    (home / "dcpbench/key").symlink_to(tmp_path / "theirs")
    assert manifest.sign(b"a") is None
    (home / "dcpbench/key").unlink()
    (home / "dcpbench/key").write_bytes(b"")
    assert manifest.sign(b"a") is None
