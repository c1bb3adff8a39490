"""The cost of the fused TPU kernels relative to two calls of other kernels.

    python -m benchmarks.tpu
    python -m benchmarks.tpu --generations v6e --lengths 4096 --masks causal
    python -m benchmarks.tpu --shapes 64,128,2,2 --lengths 1024 --masks causal
    python -m benchmarks.tpu --search --minutes 30

The other kernels are our own with one map, JAX's splash attention and
tokamax's. Of a library, the best of the tiles tried counts, for each direction
separately. The two heads of a Transformer are in the table as well.

On a TPU, these are times: medians of calls after warm-up, with inputs that
rotate. Elsewhere they are the compiler's estimates, which rank variants and are
not times. An estimate that takes longer than --timeout is missing. Rows longer
than --simulate are computed from two shorter ones and marked ~.

Rows "composed" are causal as well. They are computed from estimates of whole
and of cut tiles, whose kernels have no conditions. The estimate of a causal
grid itself has no meaning for a library, and little for comparisons of our own
kernels, so compare full masks and these rows.

Costs in diffjax/ops/diff_attention/tpu/cycles.json of the same kernels and
blocks, or of the same version of a library, are not estimated again.

`--shapes D,V,G,M …` prints the cost of single calls instead. `--search` fills
the table of block sizes (search.py).
"""

from __future__ import annotations

import argparse
import functools
import itertools

from benchmarks.tpu import compare, search
from benchmarks.tpu.case import Case
from benchmarks.tpu.compare import CAUSAL, FULL, Widths
from benchmarks.tpu.cost import cost
from benchmarks.tpu.flags import make_parser, selected_generations


def parse_widths(text: str) -> Widths:
  """Returns the widths and maps in a flag such as "128,256,2,2"."""
  numbers = text.split(",")
  if len(numbers) != 4 or not all(number.isdecimal() for number in numbers):
    raise argparse.ArgumentTypeError(
      f"{text!r} is not a shape; pass D,V,G,M, such as 128,256,2,2"
    )
  return Widths(*map(int, numbers))


def print_costs(settings: compare.Settings, shapes: list[Widths]) -> None:
  """Prints the cost of single calls, for all combinations of the flags."""
  combinations = itertools.product(
    settings.generations, shapes, settings.lengths, settings.masks
  )
  for generation, widths, length, mask in combinations:
    case = Case(
      generation, **widths._asdict(), length=length, causal=mask == CAUSAL
    )
    shape = ",".join(map(str, widths))
    costs = cost(case, settings.timeout)
    print(generation, shape, length, mask, costs, flush=True)


def main() -> None:
  """Prints the table or single costs, or searches for block sizes."""
  parser = make_parser(__doc__, generations=["v5e", "v6e"], timeout=1800.0)
  parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384])
  parser.add_argument(
    "--masks", nargs="+", choices=(CAUSAL, FULL), default=[CAUSAL, FULL]
  )
  parser.add_argument(
    "--simulate",
    type=int,
    default=4096,
    help="longest row that is estimated, a multiple of 2048",
  )
  parser.add_argument(
    "--shapes",
    nargs="+",
    type=parse_widths,
    help="D,V,G,M of single calls, instead of the table",
  )
  parser.add_argument(
    "--search", action="store_true", help="fill the table of block sizes"
  )
  parser.add_argument(
    "--minutes",
    type=float,
    default=60,
    help="duration of the search; its last candidate is finished",
  )
  parser.add_argument("--search_length", type=int, default=2048)
  flags = parser.parse_args()

  generations = selected_generations(flags)
  settings = compare.Settings(
    generations=generations,
    lengths=flags.lengths,
    masks=flags.masks,
    max_estimated_length=flags.simulate,
    timeout=flags.timeout,
  )
  if flags.shapes:
    print_costs(settings, flags.shapes)
  elif flags.search:
    search_settings = search.Settings(
      generations=generations,
      minutes=flags.minutes,
      length=flags.search_length,
    )
    measure = functools.partial(cost, timeout=flags.timeout)
    search.BlockSearch(search_settings, measure).run()
  else:
    compare.print_table(settings)


if __name__ == "__main__":
  main()
