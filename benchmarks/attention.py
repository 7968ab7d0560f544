# SPDX-License-Identifier: Apache-2.0
"""Attention beside its peers, with the goals of the design: ``python -m benchmarks.attention [--quick] ...``.

`linbias bench` with more of everything: the other ways to compute ALiBi with torch (a dense mask, compiled
FlexAttention, the formula as most models write it, the bias as one more channel), inputs that are no noise, the
figures of the native kernels, memory. Tables and a picture are written beside the record, which is kept after every
measurement; a run goes on from the one it finds there: --again starts anew.
"""

import argparse
from functools import partial

from benchmarks import figures, memory
from benchmarks.harness import carry_out, figure_text, figures_table, parser, text_table
from benchmarks.inputs import trained, with_sink
from benchmarks.peers import PEERS
from linbias.lab.bench.race import BOTH, FORWARD, Contender, race
from linbias.lab.bench.record import Finding, Measurement, Record
from linbias.lab.bench.run import LENGTHS, ROUNDS, check_backends, races, usable_backends
from linbias.lab.bench.show import Goals, describe_bench, draw_bench, gist_of_race, ratio_text
from linbias.lab.config import ModelConfig
from linbias.lab.storage import write_bytes, write_text

PARTS = ("forward", "training", "inputs", "figures", "memory")
GOALS: Goals = {
    ("linbias native", FORWARD): {512: 2.2, 1024: 2.3, 2048: 2.8, 4096: 3.6, 8192: 5.0, 16384: 8.0, 65536: 25.0},
    ("linbias native", BOTH): {1024: 1.8, 4096: 3.0, 8192: 4.5},
    ("linbias tiled", FORWARD): {1024: 1.2, 2048: 1.5, 4096: 1.8, 8192: 2.5},
    ("linbias tiled", BOTH): {8192: 2.0},
}
"""For one thread."""
_CONTENT_LENGTH = {False: 4096, True: 1024}
_MODEL = ModelConfig(layers=2, width=256, heads=4)
_MODEL_STEPS = {False: 150, True: 10}


def plan(options: argparse.Namespace, names: list[str], gaps: list[Finding], record: Record) -> list[Measurement]:
    contenders = [*map(Contender.of_linbias, names), *PEERS]
    made = races(options.lengths or LENGTHS[options.quick], options.parts, contenders, options.quick, record)
    if "inputs" in options.parts:
        made += other_inputs(options.quick, contenders, record)
    if "figures" in options.parts and "native" in names:
        made += all_figures()
    if "memory" in options.parts:
        made.append(Measurement("memory of one forward", 60.0, partial(memory.peaks, contenders)))
    return made + ([Measurement("left out", 0.0, lambda: gaps)] if gaps else [])


def other_inputs(quick: bool, contenders: list[Contender], record: Record) -> list[Measurement]:
    length, steps, rounds = _CONTENT_LENGTH[quick], _MODEL_STEPS[quick], ROUNDS[quick]

    def of_model() -> list[Finding]:
        layers = trained(_MODEL, steps, length)
        return [found for content in layers for found in race(content, contenders, FORWARD, rounds, record)]

    def of_sink() -> list[Finding]:
        return race(with_sink(length), contenders, FORWARD, rounds, record)

    return [
        Measurement(f"with a sink, {length:,} tokens", 40.0, of_sink),
        Measurement(f"a trained model, {length:,} tokens", 100.0, of_model),
    ]


def all_figures() -> list[Measurement]:
    return [
        Measurement("dense rate, D=64", 10.0, partial(figures.dense_rate, 64, 0.93)),
        Measurement("dense rate, D=128", 15.0, partial(figures.dense_rate, 128, 0.97)),
        Measurement("dense training", 15.0, figures.dense_training),
        Measurement("half types", 15.0, figures.half_types),
        Measurement("decode", 15.0, figures.decode),
        Measurement("small calls", 3.0, figures.overhead),
        Measurement("cache steps", 3.0, figures.cache_step),
        Measurement("two threads", 30.0, figures.threads, pinned=False),
        Measurement("training memory", 40.0, memory.beyond_results),
    ]


def gist(findings: list[Finding]) -> str:
    told = [f"{found['figure']}: {figure_text(found)}" for found in findings if "figure" in found]
    told += [f"{found['memory']} {found['mib']:.0f} MiB" for found in findings if "memory" in found]
    return "; ".join(told) or gist_of_race(findings)


def show(record: Record) -> str:
    """Everything that was found, as tables."""
    others = {row["length"] for row in record.having("ratio") if row["inputs"] != "normal"}
    by_inputs = {
        (row["implementation"], row["inputs"]): ratio_text(row)
        for row in record.having("ratio")
        if row["direction"] == FORWARD and row["length"] in others
    }
    sizes = {(row["memory"], row["length"]): f"{row['mib']:,.0f}" for row in record.having("memory")}
    blocks = [
        describe_bench(record, goals_for(record)),
        text_table(f"forward at {', '.join(map(str, others))} tokens, by what is attended", by_inputs),
        figures_table(record),
        text_table("MiB of one forward, output and bias included", sizes),
    ]
    return "\n\n".join(block for block in blocks if block)


def goals_for(record: Record) -> Goals:
    return GOALS if record.facts["threads"] == 1 else {}


def main() -> None:
    told = parser(__doc__, "attention.json")
    told.add_argument("--lengths", type=int, nargs="+", help="tokens; default 512 to 131,072")
    told.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    told.add_argument("--backends", nargs="+", help="of linbias; default: native and tiled, where they can run")
    options = told.parse_args()
    names, gaps = usable_backends(options.backends and tuple(options.backends))
    if "figures" in options.parts and "native" not in names:
        gaps.append({"not_run": "figures", "why": f"they are those of backend native; timed: {', '.join(names)}"})
    check_backends(names)
    record = carry_out("attention", partial(plan, options, names, gaps), options, gist)
    text, image = show(record), draw_bench(record, goals_for(record))
    print(text)
    write_text(options.output.with_suffix(".txt"), text + "\n")
    if image is not None:
        write_bytes(options.output.with_suffix(".png"), image)


if __name__ == "__main__":
    main()
