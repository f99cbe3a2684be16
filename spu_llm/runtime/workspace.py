"""The process's scratch folder: SPU's log and its Beaver cache live here and are removed at exit."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

_CLONE_FS = 0x200  # Linux: the calling thread gets a working directory of its own


@cache
def workspace() -> Path:
    """The folder, made at first use. One for the process: LevelDB's single background thread keeps to the first it saw."""
    folder = Path(tempfile.mkdtemp(prefix="spu_llm."))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def enter_workspace() -> None:
    """Make the workspace the working directory of the calling thread alone.

    SPU opens its Beaver cache under a relative path. Where the kernel refuses a private working directory the cache
    stays in the process's own one, which SPU cleans when the session closes.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS) == 0:
        os.chdir(workspace())
