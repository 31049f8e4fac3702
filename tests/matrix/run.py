"""Run rows of the matrix: `python tests/matrix/run.py [--processes] [--main] [--policy P] [--rows NAME…]`.

Prints a line for each row and policy, and exits with status 1 if any observes something else than in stock.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    """Run the rows, and return the exit status."""
    import cloudpickle

    from matrix.rows import MODULES, ROWS
    from matrix.trial import BUNDLES, PLAIN, STOCK, Variant, all_short, problem_of

    options = _arguments()
    names = options.rows or list(ROWS)
    if options.main:
        for module in MODULES:
            cloudpickle.register_pickle_by_value(module)
    policies = [options.policy] if options.policy else [PLAIN, BUNDLES]
    n_wrong = 0
    with all_short():
        reference = Variant(STOCK, options.processes)
        variants = {policy: Variant(policy, options.processes) for policy in policies}
        for name in names:
            row = ROWS[name]
            if row.needs_processes and not options.processes:
                continue
            stock = reference.run(row)
            for policy, variant in variants.items():
                begin = time.monotonic()
                result = variant.run(row)
                took_s = time.monotonic() - begin
                problem = problem_of(row, stock, result, policy)
                n_wrong += problem is not None
                share = f"{len(result.bundled)}/{stock.n_tasks}"
                facts = f"{share} | {result.divisions} | {took_s:.2f} s"
                print(f"{name} | {policy} | {facts} | {problem or 'equal'}", flush=True)
        for variant in (reference, *variants.values()):
            variant.close()
    return int(n_wrong > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", action="store_true", help="workers are 2 × 2 processes")
    parser.add_argument("--main", action="store_true", help="functions of the rows are pickled by value")
    parser.add_argument("--rows", nargs="*", help="names of rows; all if left out")
    parser.add_argument(
        "--policy", choices=["stock", "plain", "bundled"], help="plain and bundled if left out"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
