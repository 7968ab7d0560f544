# SPDX-License-Identifier: Apache-2.0
"""On which cores linbias' threads run beside vLLM's."""

import os
from contextlib import suppress
from functools import cache

import torch

from ..attention import alibi_attention


@cache
def use_cores_of_openmp() -> None:
    """Start the kernels' threads on all cores that this process' threads are bound to, once a process.

    vLLM binds each thread of OpenMP to a core of its own, the main one too, and whoever starts a thread from that one
    hands its core on: all of ours would share it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    own, cores = os.sched_getaffinity(0), set[int]()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread may have ended since
            cores |= os.sched_getaffinity(int(task))
    os.sched_setaffinity(0, cores)
    try:
        query = torch.zeros(1, 4 * torch.get_num_threads(), 64, 16)
        alibi_attention(query, query, query, torch.zeros(query.shape[1]), causal=True)
    finally:
        os.sched_setaffinity(0, own)
