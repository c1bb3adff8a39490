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
  """Replies to requests until the input ends.

  Args:
    time_limit: the time limit of one comparison in seconds. The process ends
      when a comparison reaches it.
  """
  replies = sys.stdout
  # Libraries may print, and stdout is for replies only.
  sys.stdout = sys.stderr
  # The first request is an empty line.
  sys.stdin.readline()
  try:
    import math_verify
  except ImportError as error:
    one_line = " ".join(str(error).split())
    print(one_line, file=replies, flush=True)
    return

  logging.disable(logging.CRITICAL)
  # macOS does not support the limit and raises ValueError.
  with contextlib.suppress(ValueError):
    limits = (_MAX_ADDRESS_SPACE, _MAX_ADDRESS_SPACE)
    resource.setrlimit(resource.RLIMIT_AS, limits)
  # final_answer.py has removed units. math-verify would also remove "ab" and
  # "s".
  normalization = math_verify.parser.NormalizationConfig(
    units=False, malformed_operators=True, nits=True, boxed="none"
  )
  extraction = math_verify.LatexExtractionConfig(
    boxed_match_priority=-1, normalization_config=normalization
  )

  print("ready", file=replies, flush=True)
  for line in sys.stdin:
    # The signal ends the process, also during a long operation of C code.
    signal.alarm(time_limit)
    expressions = []
    for text in json.loads(line):
      expression = math_verify.parse(
        f"${text}$",
        [extraction],
        fallback_mode="no_fallback",
        parsing_timeout=None,
      )
      expressions.append(expression)
    answer, reference = expressions
    # More digits than a float has, so that decimals are compared exactly.
    is_equal = math_verify.verify(
      reference,
      answer,
      float_rounding=17,
      numeric_precision=50,
      timeout_seconds=None,
    )
    signal.alarm(0)
    print(json.dumps(is_equal), file=replies, flush=True)


if __name__ == "__main__":
  main(int(sys.argv[1]))
