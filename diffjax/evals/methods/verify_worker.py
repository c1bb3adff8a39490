"""The process of equivalence.py: compares expressions with math-verify.

equivalence.py explains the requests and replies. This file is run as a program.
It imports nothing from diffjax.
"""

import contextlib
import json
import logging
import resource
import signal
import sys

# The limit of the process's address space, in bytes.
_MAX_ADDRESS_SPACE = 4 << 30


def main(time_limit: int) -> None:
  """Compares the pair of expressions in each line of stdin, until it ends.

  Args:
    time_limit: The time limit of one comparison in seconds. The process ends
      when a comparison reaches it.
  """
  replies = sys.stdout
  # Libraries may print, and stdout is for replies only.
  sys.stdout = sys.stderr

  # The first request is an empty line. The reply is "ready" or an error.
  sys.stdin.readline()
  try:
    import math_verify  # noqa: F401
  except ImportError as error:
    one_line = " ".join(str(error).split())
    print(one_line, file=replies, flush=True)
    return
  # math-verify logs expressions that it cannot compare.
  logging.disable(logging.CRITICAL)
  limit_memory()
  print("ready", file=replies, flush=True)

  for line in sys.stdin:
    answer, reference = json.loads(line)
    # At the time limit, a signal ends the process, even if C code is running.
    signal.alarm(time_limit)
    is_equal = compare(answer, reference)
    signal.alarm(0)
    print(json.dumps(is_equal), file=replies, flush=True)


def limit_memory() -> None:
  """Limits the address space of this process, where the system supports it."""
  # macOS does not support the limit and raises ValueError.
  with contextlib.suppress(ValueError):
    limits = (_MAX_ADDRESS_SPACE, _MAX_ADDRESS_SPACE)
    resource.setrlimit(resource.RLIMIT_AS, limits)


def compare(answer: str, reference: str) -> bool:
  """Returns whether two expressions in LaTeX are equal.

  It sets no time limits of math-verify, because `main` has one.
  """
  import math_verify

  # math-verify would remove units, and take "ab" and "s" for units.
  # final_answer.py has already removed them.
  normalization = math_verify.parser.NormalizationConfig(
    units=False, malformed_operators=True, nits=True, boxed="none"
  )
  extraction = math_verify.LatexExtractionConfig(
    boxed_match_priority=-1, normalization_config=normalization
  )
  expressions = []
  for text in (answer, reference):
    expression = math_verify.parse(
      f"${text}$",
      [extraction],
      fallback_mode="no_fallback",
      parsing_timeout=None,
    )
    expressions.append(expression)
  answer_expression, reference_expression = expressions
  return math_verify.verify(
    reference_expression,
    answer_expression,
    # More digits than a float has, so that decimals are compared exactly.
    float_rounding=17,
    numeric_precision=50,
    timeout_seconds=None,
  )


if __name__ == "__main__":
  main(int(sys.argv[1]))
