"""Many faults, the same for the same seed: `python tests/fault_runs.py 20000`.

Most faults strike in virtual time, in scenarios that the seed varies. The others strike features on a
cluster in this process. `python tests/fault_runs.py 1 --first 1234` repeats one of them.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import virtual_faults
from fault_injection import Injection, Injector, code_of_functions, injections
from feature_faults import FEATURES, Bench, choose

#: One of so many faults strikes a feature; a virtual scenario has so many faults.
ONE_IN, PER_SCENARIO = 20, 200
#: A fault after which nothing happens ends the process, with the stacks of all threads [s].
_HUNG_S = 120.0
#: A problem that is none: in this run, the function was called less often than in the one that counted.
MISSED = "the fault did not strike"
_CODES = code_of_functions()


class Runs:
    """Faults by their numbers.

    Parameters
    ----------
    seed : int
    checks_time : bool, optional
        As of `Bench`.
    """

    def __init__(self, seed: int, checks_time: bool = True) -> None:
        self._seed = seed
        self._checks_time = checks_time
        self._virtual: tuple[tuple[str, int], list[Injection]] | None = None
        self.counts: Counter[str] = Counter()

    def run(self, numbers: Iterable[int]) -> Iterator[tuple[int, str, list[str]]]:
        """Yield number, fault and problems of each fault."""
        with Bench(self._checks_time).open() as bench:
            for number in numbers:
                faulthandler.dump_traceback_later(_HUNG_S, exit=True)
                yield (
                    number,
                    *(self._virtual_fault(number) if number % ONE_IN else self._feature_fault(number, bench)),
                )
                faulthandler.cancel_dump_traceback_later()

    def _virtual_fault(self, number: int) -> tuple[str, list[str]]:
        group = number // PER_SCENARIO
        scenario = (list(virtual_faults.MODES)[group % len(virtual_faults.MODES)], self._seed * 1000 + group)
        if self._virtual is None or self._virtual[0] != scenario:
            self._virtual = scenario, injections(virtual_faults.calls(scenario[0], _CODES, scenario[1]))
        injection = random.Random(f"{self._seed} {number}").choice(self._virtual[1])
        mode, seed = scenario
        run = virtual_faults.Run(mode, Injector(injection, _CODES), seed=seed)
        problems = run.play()
        self.counts[f"virtual time, {mode}"] += MISSED not in problems
        return f"{mode}, scenario {seed}: {injection}", problems

    def _feature_fault(self, number: int, bench: Bench) -> tuple[str, list[str]]:
        feature = list(FEATURES)[number // ONE_IN % len(FEATURES)]
        function, error, n = choose(bench, feature, random.Random(f"{self._seed} {number}"))
        self.counts[feature] += 1
        return f"{feature}: {function} raises {error.__name__} at call {n}", bench.inject(
            feature, function, error, n
        )


def main() -> None:
    """Run faults and print what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("n", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    runs, wrong, began = Runs(options.seed), 0, time.monotonic()
    for number, fault, problems in runs.run(range(options.first, options.first + options.n)):
        if MISSED in problems:
            runs.counts[MISSED] += 1
            continue
        if problems:
            wrong += 1
            print(f"{number}: {fault}: {'; '.join(problems)}", flush=True)
        if not (number + 1) % 500:
            print(f"{number + 1} faults, {wrong} wrong, {time.monotonic() - began:.0f} s", flush=True)
    n_missed = runs.counts.pop(MISSED, 0)
    for area, n in runs.counts.items():
        print(f"{n:>6} {area}")
    print(f"{runs.counts.total()} faults, {wrong} wrong; {n_missed} more did not strike")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
