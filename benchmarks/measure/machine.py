"""What a result file has to say about where it was made."""

import datetime
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess

# The instructions that decide how fast 16-bit products are on a CPU, best first.
FEATURES = ("amx_fp16", "amx_bf16", "avx512_fp16", "avx512_bf16", "avx512f", "avx2")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "libtpu")
ON_A_GPU = (
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("nvidia-cublas-cu12", "nvidia-cublas", "torch", "torchvision", "timm", "transformers"),
    "triton",
)
ROOT = pathlib.Path(__file__).parents[2]


def cpu() -> str:
    """Returns the processor's name, the number of cores, and its features for products."""
    fields: dict[str, str] = {}
    info = pathlib.Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.processor() or platform.machine())
    flags = fields.get("flags", "").split()
    has = [f for f in FEATURES if f in flags]
    lacks = [f for f in ("amx_bf16", "avx512_bf16") if f not in flags]
    return (
        f"{name}, {os.cpu_count()} cores; has {', '.join(has) or 'unknown'}"
        f"{'; no ' + ', no '.join(lacks) if lacks else ''}"
    )


def versions() -> str:
    """Returns the versions of what the numbers depend on."""
    found = [f"Python {platform.python_version()}"]
    for package in (*PACKAGES, *ON_A_GPU):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    """Returns the checked-out commit, "-dirty" where tracked files differ; "" without git.

    What benchmarks themselves write does not count: one run would mark the next.
    """
    root = pathlib.Path(__file__).parents[2]
    name = _git(root, "describe", "--always", "--exclude=*")
    written = (":(exclude)benchmarks/results", ":(exclude)docs/images")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *written)
    return f"{name}-dirty" if changed else name


def made() -> str:
    """Returns when a result was made, of which commit, and with which versions."""
    of = f"commit {commit()}" if commit() else f"tree {tree_hash('mpjax')}"
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}; {of}; {versions()}"


def tree_hash(*paths: str) -> str:
    """Returns a hash of the Python files at these paths of the checkout, folders with all below.

    What two runs have in common where git is missing, or where nothing is committed yet.
    """
    digest = hashlib.sha256()
    for path in paths:
        start = ROOT / path
        files = sorted(start.rglob("*.py")) if start.is_dir() else [start]
        for file in files:
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _git(root: pathlib.Path, *words: str) -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()
