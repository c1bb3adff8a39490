"""Compares expressions with math-verify, as the process of equivalence.py.

The first reply is "ready", or why math-verify cannot be imported. Then each line
of the input is a JSON list of an answer and the wanted answer, and each line of
the output is true or false.
"""

import contextlib
import json
import logging
import resource
import signal
import sys

_BYTES = 4 << 30  # of address space


def main(seconds: int) -> None:
  """Answers requests until the input ends.

  Args:
    seconds: Limit of one comparison, after which the process ends.
  """
  replies = sys.stdout
  sys.stdout = sys.stderr  # Libraries may print.
  # An empty line of the parent, which reads "ready" or an error.
  sys.stdin.readline()
  try:
    import math_verify
  except ImportError as error:
    print(" ".join(str(error).split()), file=replies, flush=True)
    return
  logging.disable(logging.CRITICAL)
  with contextlib.suppress(ValueError):  # macOS refuses.
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
  # final_answer.py has removed units. math-verify would also remove "ab" and
  # "s".
  normalization = math_verify.parser.NormalizationConfig(
    units=False, malformed_operators=True, nits=True, boxed="none"
  )
  latex = math_verify.LatexExtractionConfig(
    boxed_match_priority=-1, normalization_config=normalization
  )
  print("ready", file=replies, flush=True)
  for line in sys.stdin:
    # The signal ends the process, also inside a long operation of C code.
    signal.alarm(seconds)
    expressions = [
      math_verify.parse(
        f"${text}$",
        [latex],
        fallback_mode="no_fallback",
        parsing_timeout=None,
      )
      for text in json.loads(line)
    ]
    answer, wanted = expressions
    # More digits than a float has: decimals are compared exactly.
    is_equal = math_verify.verify(
      wanted,
      answer,
      float_rounding=17,
      numeric_precision=50,
      timeout_seconds=None,
    )
    signal.alarm(0)
    print(json.dumps(is_equal), file=replies, flush=True)


if __name__ == "__main__":
  main(int(sys.argv[1]))
