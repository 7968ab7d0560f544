# SPDX-License-Identifier: Apache-2.0
"""A long document through a BLOOM model in a process that may take 3 GB: ``python -m benchmarks.long_document FILE``.

Without a file it reads one of the novels that come with the package, as bytes. The patched model goes through, the
unpatched one, which needs several tensors of heads * tokens^2, must fail; the program ends with 0 if both is so.
"""

import argparse
import lzma
import multiprocessing
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

HEADS, LAYERS = 16, 2


def read(path: Path | None) -> bytes:
    """The text, from the file given or from the package."""
    if path is not None:
        return path.read_bytes()
    from linbias import lab

    return lzma.decompress((Path(lab.__path__[0]) / "corpus" / "emma.txt.xz").read_bytes())


def attempt(text: bytes, patched: bool, width: int, limit: float, report: Connection) -> None:
    """Read the text under the limit on this process's address space, and tell how that went."""
    resource.setrlimit(resource.RLIMIT_AS, (int(limit * 1e9),) * 2)
    import torch
    from transformers import BloomConfig, BloomModel

    import linbias
    from benchmarks.memory import peak_mib

    torch.manual_seed(0)
    model = BloomModel(BloomConfig(vocab_size=256, hidden_size=width, n_layer=LAYERS, n_head=HEADS)).eval()
    if patched:
        linbias.patch(model)
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)[None].long()
    start = time.process_time()
    try:
        with torch.no_grad():
            hidden = model(ids, use_cache=False).last_hidden_state
    except (RuntimeError, MemoryError) as error:
        report.send(f"failed: {str(error).splitlines()[0]}")
        return
    assert hidden.isfinite().all()
    peak = peak_mib() * 2**20 / 1e9
    report.send(f"read in {time.process_time() - start:.1f} s of CPU time, {peak:.2f} GB at most")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="any text; default: a novel of the package")
    parser.add_argument("--tokens", type=int, default=16384, help="bytes of it to read")
    parser.add_argument("--width", type=int, default=1024, help=f"of the model, which has {HEADS} heads")
    parser.add_argument("--limit", type=float, default=3.0, help="GB of address space")
    options = parser.parse_args()
    text = read(options.file)[: options.tokens]
    print(f"{len(text):,} tokens, {LAYERS} layers of width {options.width}, limit {options.limit:g} GB")
    outcomes = []
    for name, patched in (("patched", True), ("unpatched", False)):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=attempt, args=(text, patched, options.width, options.limit, theirs)
        )
        process.start()
        theirs.close()
        try:
            outcomes.append(ours.recv())
        except EOFError:
            outcomes.append("failed: the process was ended")
        process.join()
        print(f"{name:10} {outcomes[-1]}", flush=True)
    return int(not (outcomes[0].startswith("read") and outcomes[1].startswith("failed")))


if __name__ == "__main__":
    sys.exit(main())
