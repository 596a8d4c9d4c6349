"""Whether memory stays where it is: what the process holds after each of many iterations.

    OMP_NUM_THREADS=1 python tests/benchmarks/memory_flat.py

The quickstart with 2 groups of 4 samples and 4 steps, so that 50 iterations are soon done. The slope is that of
a least-squares line over the second half: allocators and caches settle in the first.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from quickstart import Watch, built, circumstances, run

SMALL = [
    *("--data.num_groups", "2", "--data.group_size", "4"),
    *("--model.rollout.init_args.num_steps", "4", "--model.timesteps_per_sample", "2"),
]


def resident(arguments: Sequence[str], *, iterations: int) -> list[int]:
    """Bytes after each iteration."""
    watch = Watch()
    run(built(arguments, iterations=iterations), watch)
    return watch.resident


def slope(values: Sequence[float]) -> float:
    """Slope of the least-squares line through values at 0, 1, 2 and so on.

    >>> slope([5.0, 7.0, 9.0])
    2.0
    """
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    covariance = sum((x - middle) * (value - mean) for x, value in enumerate(values))
    return covariance / sum((x - middle) ** 2 for x in range(len(values)))


def report(values: Sequence[int]) -> dict[str, float]:
    """In MiB: after the first iteration, in the middle, at the end, and growth by one iteration."""
    size = [value / 2**20 for value in values]
    half = len(size) // 2
    return {
        "iterations": len(size),
        "first": size[0],
        "middle": size[half],
        "last": size[-1],
        "largest": max(size),
        "slope": slope(size[half:]),
    }


def main() -> None:
    """Prints the line; writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--json", type=Path, default=None, help="where the numbers go")
    parser.add_argument("--config", action="append", default=[], help="an overlay over the quickstart")
    options = parser.parse_args()
    overlays = [argument for path in options.config for argument in ("--config", path)]
    values = resident([*SMALL, *overlays], iterations=options.iterations)
    found = report(values)
    print(
        f"\n{found['iterations']} iterations: {found['first']:.1f} MiB after the first, "
        f"{found['middle']:.1f} in the middle, {found['last']:.1f} at the end, {found['largest']:.1f} at most; "
        f"in the second half {found['slope']:+.3f} MiB by iteration\n{circumstances()}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({**found, "MiB": [v / 2**20 for v in values], **circumstances()}))


if __name__ == "__main__":
    main()
