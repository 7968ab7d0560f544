# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz --minutes 30`: random calls, cache histories and hostile keys, each judged by the oracle.

A finding is printed with its seed: `--what calls --seed N --cases 1` tries that one again.
"""

import argparse
import secrets
import sys
import warnings

import torch

from tests.fuzz import caches, calls, certificate
from tests.fuzz.loop import fuzz

FUZZERS = {"calls": calls.FUZZER, "caches": caches.FUZZER, "certificate": certificate.FUZZER}


def main() -> int:
    """Run the fuzzers one after the other; the exit status is 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of each fuzzer; default 1")
    parser.add_argument("--cases", type=int, default=0, help="try this many instead")
    parser.add_argument("--what", choices=list(FUZZERS), help="one fuzzer; default: all")
    parser.add_argument("--seed", type=int, help="of the first case, the next ones count on; default: a fresh one")
    given = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    found = 0
    for name in [given.what] if given.what else FUZZERS:
        seed = secrets.randbelow(2**31) if given.seed is None else given.seed
        print(f"{name}: seed {seed}", flush=True)
        seconds = 0.0 if given.cases else 60 * given.minutes
        counts, findings = fuzz(FUZZERS[name], seed, seconds=seconds, cases=given.cases, report=print)
        found += len(findings)
        print(f"{name}: {len(findings)} findings in " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
