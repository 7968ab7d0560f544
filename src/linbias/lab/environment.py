# SPDX-License-Identifier: Apache-2.0
"""What a result was computed with."""

import platform
from importlib import metadata
from pathlib import Path

import torch

from .. import __version__
from .tasks import usable_cores

PACKAGES = ("numpy", "tyro", "tqdm", "matplotlib", "jinja2", "safetensors", "transformers")


def versions() -> dict[str, str | None]:
    """Return the version of each package that linbias can use, None where it is not installed."""
    return {"linbias": __version__, "torch": torch.__version__} | {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, str | int]:
    """Return what the machine is."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "processor": _processor(),
        "cores": usable_cores(),
        "torch threads": torch.get_num_threads(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    # platform.processor() is empty or just "x86_64" on Linux, where /proc knows the model.
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def accelerators() -> dict[str, str]:
    """Return the devices besides the CPU that torch can use, or why it cannot."""
    found: dict[str, str] = {}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    elif torch.version.cuda is None and torch.version.hip is None:
        found["cuda"] = "none: this torch was built without CUDA and ROCm"
    else:
        found["cuda"] = "none: torch sees no device"
    if platform.system() == "Darwin":
        found["mps"] = "available" if torch.backends.mps.is_available() else "none: torch cannot use it here"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found["xpu"] = f"{torch.xpu.device_count()} available"
    return found
