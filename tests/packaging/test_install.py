"""What an installed Regraft leaves in site-packages, and what the source tree does to its neighbours."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("install")  # one worker builds the wheel, once

ROOT = Path(__file__).parents[2]
FOLDERS = ("rewriter", "passes", "runtime", "kernels")
# Those that are imported without a GPU; files named after Triton are the others.
MODULES = sorted(
    ".".join(("regraft", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.startswith("triton")
)


def python(*arguments: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Standard output of this interpreter in a process of its own."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "HF_HUB_OFFLINE": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that no build folder is left in the tree."""
    source, target = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    python("-m", "pip", "wheel", *options, "--wheel-dir", target, source, cwd=target)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site-packages of a fresh virtual environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("fresh")
    python("-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    interpreter = folder / "venv" / "bin" / "python"
    options = ["--no-deps", "--no-index", "--quiet"]
    python("-m", "pip", "--python", interpreter, "install", *options, wheel, cwd=folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    return packages


def test_the_wheel_holds_every_file_of_the_folders_and_nothing_else(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    here = {path for path in here if "__pycache__" not in path.parts}
    here |= {path for path in ROOT.glob("*.py") if path.name != "setup.py"} | {ROOT / "py.typed"}
    assert packed == {f"regraft/{path.relative_to(ROOT).as_posix()}" for path in here}


def test_only_regraft_is_put_into_site_packages(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if path.name != "__pycache__"}
    assert names == {"regraft", "regraft-0.1.0.dist-info"}


def test_the_entry_points_are_declared(installed: Path) -> None:
    declared = (installed / "regraft-0.1.0.dist-info" / "entry_points.txt").read_text()
    assert "[console_scripts]\nregraft = regraft.__main__:main" in declared
    assert "[torch_dynamo_backends]\nregraft = regraft.rewriter.backend:" in declared


def test_the_installed_package_works_without_the_tree(installed: Path, tmp_path: Path) -> None:
    """Run with this environment's packages behind the fresh ones, as an installation has them."""
    code = f"""
        import importlib, pkgutil, sys
        sys.path.append({site.getsitepackages()[0]!r})
        import regraft
        assert regraft.__file__.startswith({str(installed)!r}), regraft.__file__
        import regraft.rewriter.declare, regraft.runtime.config
        assert importlib.util.find_spec("kernels") is None
        found = pkgutil.iter_modules(importlib.import_module("regraft.kernels").__path__)
        print(sum(module.ispkg for module in found))
    """
    interpreter = installed.parents[2] / "bin" / "python"
    command = [str(interpreter), "-I", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    operators = [path for path in (ROOT / "kernels").iterdir() if (path / "__init__.py").exists()]
    assert int(done.stdout) == len(operators)


def test_a_process_in_the_tree_still_finds_the_package_named_kernels(tmp_path: Path) -> None:
    """transformers probes for a third-party package `kernels`; our folder must not be taken for it."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.99.0'\n")
    find = "import importlib.util; print(importlib.util.find_spec('kernels').origin)"
    assert python("-c", find, cwd=ROOT, path=tmp_path).strip() == str(package / "__init__.py")


def test_a_process_in_the_tree_has_no_package_named_kernels_if_nobody_has(tmp_path: Path) -> None:
    probe = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    expected = python("-c", probe, cwd=tmp_path).strip()
    assert python("-c", probe, cwd=ROOT).strip() == expected


@pytest.mark.parametrize("everything", [False, True], ids=["the face", "every module"])
def test_importing_changes_nothing_global(everything: bool, tmp_path: Path) -> None:
    """No setting, patch, log handler or GPU library; of the face alone, not even Triton."""
    code = f"""
        import importlib, logging, os, random, sys, warnings
        import numpy, torch, transformers, transformers.masking_utils
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        def everything_global():
            return dict(
                dtype=torch.get_default_dtype(), device=torch.get_default_device(),
                grad=torch.is_grad_enabled(), threads=torch.get_num_threads(),
                deterministic=torch.are_deterministic_algorithms_enabled(),
                tf32=(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
                precision=torch.get_float32_matmul_precision(),
                rng=torch.random.get_rng_state().tolist(), python_rng=random.getstate(),
                numpy_rng=numpy.random.get_state()[1].tolist(),
                warnings=list(warnings.filters), environment=dict(os.environ), path=list(sys.path),
                handlers=list(logging.root.handlers), level=logging.root.level,
                transformers_level=transformers.logging.get_verbosity(),
                attention=sorted(ALL_ATTENTION_FUNCTIONS.keys()),
                experts=sorted(ALL_EXPERTS_FUNCTIONS.keys()),
                linear=torch.nn.Linear.forward, sdpa=torch.nn.functional.scaled_dot_product_attention,
                hooks=(sys.excepthook, sys.displayhook, list(sys.meta_path)),
            )

        before, loaded = everything_global(), set(sys.modules)
        import regraft
        if {everything}:
            for module in {MODULES!r}:
                importlib.import_module(module)
        after = everything_global()
        changed = [key for key in before if before[key] != after[key]]
        assert not changed, changed
        new = {{name.partition(".")[0] for name in set(sys.modules) - loaded}}
        assert "fla" not in sys.modules
        assert {everything} or "triton" not in new, new
        assert {everything} or new <= {{"regraft"}} | sys.stdlib_module_names, new
    """
    python("-c", textwrap.dedent(code), cwd=tmp_path)
