from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import benchmarks.stress
from benchmarks import commands
from benchmarks.stress import budgets, exact, report, runner
from lrd_kernels.ops import load

__doc__ = benchmarks.stress.__doc__


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser("benchmarks.stress", benchmarks.stress.__doc__, "stress.md")
    parser.add_argument("--count", type=int, default=2000, help="number of cases for each function")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random cases")
    functions = "functions to test, instead of all: " + ", ".join(runner.CHECKS)
    parser.add_argument("--functions", nargs="+", choices=list(runner.CHECKS), metavar="NAME", help=functions)
    parser.add_argument("--number", type=int, help="run this case of the functions alone, in this process")
    parser.add_argument("--isas", nargs="+", choices=load.available_isas(), help="instruction sets, instead of all")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="number of processes")
    parser.add_argument("--budgets", action="store_true", help="print the table of budgets for docs/safety.md")
    options = parser.parse_args(argv)
    if options.budgets:
        print(budgets.table(), end="")
        return 0
    names = options.functions or list(runner.CHECKS)
    if options.number is not None:
        exact.precise()
        problems = [runner.attempt(name, options.seed, options.number)[1] for name in names]
        print("\n".join(problem or "right" for problem in problems))
        return int(any(problems))
    isas = options.isas or load.available_isas()
    outcomes = runner.run_all(names, options.count, options.seed, isas, options.processes)
    text = report.report(outcomes, options.seed, isas)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)
    print(text)
    return int(any(outcome.counts["wrong"] for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
