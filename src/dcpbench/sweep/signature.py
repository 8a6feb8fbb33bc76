"""Which sweeps this user has made: their records are signed with a key that lies in the user's home."""

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from dcpbench.records import files

_KEY_BYTES = 32


def sign(content: bytes) -> str | None:
    """The signature of this user under a record; None where there is no place to keep a key."""
    key = _key()
    return hmac.digest(key, content, "sha256").hex() if key else None


def is_own(content: bytes, signature: object) -> bool:
    """Whether it is this user's signature, with the key that is here now."""
    own = sign(content)
    return own is not None and hmac.compare_digest(own.encode(), str(signature).encode())


def place() -> Path:
    """Where the key lies; RuntimeError where the user has no home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "dcpbench" / "key"


def _key() -> bytes | None:
    """The key, which is made when it is first asked for."""
    try:
        path = place()
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside = path.with_name(files.temporary_name())
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):  # another process was faster: one key for both
                path.hardlink_to(beside)
            beside.unlink()
        key = files.read(path)
    except (OSError, RuntimeError):
        return None
    return key if len(key) == _KEY_BYTES else None
