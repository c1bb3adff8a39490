"""Answers are found in solutions, and compared by the module's rules."""

import concurrent.futures
import operator
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify")

from diffjax.config import UserError
from diffjax.evals.methods import equivalence
from diffjax.evals.methods.final_answer import (
  extract_answer,
  is_same_answer,
  last_boxed,
  reference_answer,
)


@pytest.mark.parametrize(
  "solution, answer",
  [
    # GSM8K.
    (
      "48/2 = <<48/2=24>>24 clips in May.\n"
      "48+24 = <<48+24=72>>72 altogether.\n#### 72",
      "72",
    ),
    ("#### 1,234", "1,234"),
    ("####-5\nQuestion: another\n#### 9", "-5"),
    ("So she pays $1,050.50.", "$1,050.50"),
    ("He has 5 - 3 = 2 apples left, as 3-4 people said.", "4"),
    ("That makes -7.", "-7"),
    ("He eats 3/4 of it.", "3/4"),
    ("It costs $.50", "$.50"),
    ("first 1, then 2, then 30,", "30"),
    ("The answer is 42. There are 7 days in a week.", "42"),
    (
      "The final answer is $\\frac{1}{2}$. I hope it is correct.",
      r"\frac{1}{2}",
    ),
    ("the answer is: 12 apples", "12"),
    ("The answer is 5. No, the answer is 6.", "6"),
    ("The answer is unknown, say 8", "8"),
    ("no number at all", None),
    ("", None),
    # MATH.
    (r"so \boxed{72}", "72"),
    (r"$\boxed{\frac{1}{\sqrt{2}}}$ and #### 3", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{1}, no, \boxed{2}", "2"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{[0, 1\}}", r"[0, 1\}"),
    (r"\fbox{x^{2^{3}}}.", "x^{2^{3}}"),
    (r"\boxed {5}", "5"),
    (r"$\boxed 5$.", "5"),
    (r"\boxed{3} and the rest is \boxed{4", "3"),
    # A box that is not closed is none, so the last number counts.
    (r"cut short: \boxed{12", "12"),
    (r"\boxed{}", ""),
    (r"\boxedfoo{3} 4", "4"),
    # Digits, signs and delimiters.
    ("The answer is 9{,}500.", "9500"),
    (r"so $10,\!000$", "$10000"),
    (r"#### 9\,500", "9500"),
    (r"\boxed{1{,}000{,}000}", "1000000"),
    (r"The answer is \(\frac{2}{3}\).", r"\frac{2}{3}"),
    (r"\(\frac{2}{3}\).", r"\frac{2}{3}"),
    (r"so \[1\frac{2}{3}\]", r"1\frac{2}{3}"),
    (r"The answer is \[ x + 1 \]", "x + 1"),
    (r"The answer is $$x + 1$$", "x + 1"),
    (r"The answer is \frac{2 \sqrt{3}}{3}.", r"\frac{2 \sqrt{3}}{3}"),
    (r"The answer is -2\sqrt 3, or so", r"-2\sqrt 3"),
    (r"The answer is \boxed{12", "12"),
    ("The answer is −5.", "-5"),
    ("It is 3 − 5 = −2", "-2"),
    ("pages 3–4", "4"),
    ("The answer is ４２", "42"),
    ("The answer is ٤٢٫٥", "42.5"),
  ],
)
def test_the_final_answer_of_a_solution_is_extracted(solution, answer):
  assert extract_answer(solution) == answer


@pytest.mark.parametrize(
  "solution, answer",
  [
    ("one\n#### 5", "5"),
    (r"it is \boxed{x+1}.", "x+1"),
    (" 3x + 2 ", "3x + 2"),
    ("72", "72"),
    (r"\frac{3}{4}", r"\frac{3}{4}"),
  ],
)
def test_a_reference_is_marked_boxed_or_the_whole_text(solution, answer):
  """GSM8K marks an answer with ####, and MATH boxes it."""
  assert reference_answer(solution) == answer


# Groups of answers that the rules of the module equate.
SAME = [
  (
    "72",
    "72.0",
    " 72 ",
    "$72",
    "72.",
    r"\$72",
    "$72$",
    "+72",
    "72 dollars",
    "72 pts",
    "72 pm",
    "72 USD",
    "72 eggs",
    r"72\text{ dollars}",
    "x = 72",
    r"\text{72}",
  ),
  (
    "1200",
    "1,200",
    "$1,200.00",
    "1{,}200",
    r"1,\!200",
    r"1\,200",
    "1 200",
    "１２００",
  ),
  ("-5", "−5", "–5", "-5.0", r"-\frac{10}{2}", r"\(-5\)."),
  (
    "0.5",
    ".5",
    "1/2",
    r"\frac12",
    r"\frac{1}{2}",
    r"\dfrac{1}{2}",
    r"\tfrac 1 2",
    r"\frac{2}{4}",
    r"\frac1{2}",
    r"\frac{1}2",
  ),
  (r"1\frac{1}{2}", "3/2", "1.5", "1 1/2"),
  ("2/3", r"\(\frac{2}{3}\).", r"\[\frac23\]"),
  (r"-\frac{1}{2}", r"\frac{-1}{2}", "-1/2", "-0.5"),
  (r"50\%", "50%", "50"),
  ("90", r"90^\circ", r"90^{\circ}", "90°", r"90\degree", "90 degrees"),
  (r"10\text{ cm}^2", r"10 \mathrm{cm}^{2}", "10", "10 cm^2"),
  (r"\sqrt2", r"\sqrt{2}", r"\sqrt 2", "√2"),
  (r"\left( 1, \frac{1}{2} \right)", "(1,0.5)", r"(1,\,1/2)"),
  ("[0,1)", r"\left[0, 1\right)"),
  (r"\{1, 2, 3\}", r"\{3,2,1\}", r"\left\{ 1,\; 2,\; 3 \right\}"),
  ("1, -2", "-2,1"),
  (r"\text{(A)}", "(A)", "A", r"\textbf{(A)}", r"\text{A}"),
  (r"\text{Evelyn}", "Evelyn"),
  ("x^2+1", "x^2 + 1", "f(x) = x^2+1", "$x^2+1$."),
  (r"x \in [0,1]", "[0,1]"),
  ("(1,2)(3,4)", "(1, 2)(3, 4)"),
]
# Groups of expressions that math-verify finds equal.
EQUAL = [
  ("x+1", "1+x", r"\frac{2x+2}{2}"),
  (r"2\sqrt{3}", r"\sqrt{12}"),
  (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
  (r"3\times10^4", "30000", "3×10^4"),
  ("(x+1)(x-1)", "x^2-1"),
  (r"5\pi", "5 pi", "5π", r"5 \pi"),
  (r"5\pi r", r"5 r \pi"),
  ("(x+1,2)", r"(1 + x, \frac{4}{2})"),
  (r"\{x+1,3\}", r"\{3, 1+x\}"),
  (r"-\infty", "-∞"),
  (r"\pm 3", "3, -3"),
  (r"x \geq 2", r"2 \leq x"),
  (
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"\begin{pmatrix}1\\2\end{pmatrix}",
  ),
]


@pytest.mark.parametrize("group", SAME + EQUAL, ids=operator.itemgetter(0))
def test_answers_of_a_group_are_the_same(group):
  for left in group:
    for right in group:
      assert is_same_answer(left, right), (left, right)


@pytest.mark.parametrize("group", SAME, ids=operator.itemgetter(0))
def test_answers_of_other_groups_are_different(group):
  """The answers of a group in SAME are equal, for example "1/2" and "0.5"."""
  for other_group in SAME:
    if other_group is group:
      continue
    for answer in other_group:
      assert not is_same_answer(group[0], answer), (group[0], answer)


@pytest.mark.parametrize(
  "left, right",
  [
    ("72", "73"),
    ("72", "720"),
    ("1/2", "1/3"),
    ("50%", "0.5"),
    ("(1,2)", "(2,1)"),
    ("(0,1)", "[0,1]"),
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,1,2\}", r"\{1,2,2\}"),
    ("(1,2)(3,4)", "(1,2)"),
    ("", "0"),
    ("x", "y"),
    (r"\frac{1}{0}", "0"),
    ("1/0", "1"),
    ("12", "1,2"),
    (r"\sqrt{2}", "2"),
    ("A", "B"),
    (r"5\text{ cm}", r"6\text{ cm}"),
    # Not equated, as the module says.
    ("0.33", "1/3"),
    ("0.333333333", "1/3"),
    ("3.14159265", r"\pi"),
    ("five", "5"),
    ("2 x", "2"),
    ("2x", "2"),
    # Units are not products. Signs and digits are not left out.
    ("4 xy", "4 yz"),
    ("4 xy", "4"),
    ("6 epsilon", "6"),
    ("3:4", "3/4"),
    ("5 pi", "5"),
    ("5 theta", "5"),
    ("5 m", "5"),
    ("3ab", "3"),
    ("−5", "5"),
    (r"\(\frac{2}{3}\).", "2"),
    ("9{,}500", "9"),
    ("9 500", "509"),
    ("1 1/2", "1"),
    # math-verify alone finds these equal.
    ("east", "seat"),
    ("12_3", "12_4"),
    ("12_3", "12"),
    ("0.0000001", "0.0000002"),
    (r"1.6\times10^{-19}", r"3.2\times10^{-19}"),
    ("x", ""),
  ],
)
def test_these_answers_are_different(left, right):
  assert not is_same_answer(left, right)
  assert not is_same_answer(right, left)


# Pieces of texts that models write.
PIECES = (
  *r"\ { } ( ) [ ] , . $ % - + = / ^ _ 1 2 0 x".split(),
  *r"\frac \boxed \text \left \right \sqrt \circ #### \{ \} \$ \%".split(),
  "answer is",
  " ",
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_any_text_has_a_reference_answer_that_equals_itself(pieces):
  text = "".join(pieces)

  # Raises no error.
  last_boxed(text)
  assert isinstance(reference_answer(text), str)
  assert is_same_answer(text, text)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_an_extracted_answer_equals_itself(pieces):
  answer = extract_answer("".join(pieces))

  if answer is not None:
    assert is_same_answer(answer, answer)


@pytest.mark.full
def test_math_verify_ends_at_its_time_limit(caplog):
  """The library math-verify runs in a process, which is killed after a second.

  It computes the power in C code, which no exception interrupts.
  """
  worker = equivalence.Worker(time_limit=1)

  is_equal = worker.compare("9^{9^{9}}", "1")

  assert not is_equal
  assert "ended while it compared '9^{9^{9}}'" in caplog.text
  # The next comparison starts a new process.
  assert worker.compare("x + 1", "1 + x")
  worker.close()


def test_math_verify_compares_in_any_thread():
  """All threads use one process. Requests must not get each other's replies."""

  def is_commutative(number: int) -> bool:
    return is_same_answer(f"x+{number}", f"{number}+x")

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert all(pool.map(is_commutative, range(20)))


def test_the_error_without_math_verify_names_the_extra(tmp_path):
  """The process prints the error of the import, and the user gets it."""
  program = tmp_path / "worker.py"
  program.write_text("print(\"No module named 'math_verify'\")")
  worker = equivalence.Worker(program=program)

  message = "No module named 'math_verify'.*pip install 'diffjax.eval.'"
  with pytest.raises(UserError, match=message):
    worker.start()


def test_numbers_are_compared_without_math_verify(monkeypatch):
  """Only other expressions need that library, which takes long."""

  def raise_error(answer: str, reference: str) -> bool:
    raise AssertionError("math-verify is not needed")

  monkeypatch.setattr(equivalence, "is_equal", raise_error)

  assert is_same_answer("0.5", "1/2")


@pytest.mark.parametrize(
  "text",
  [
    pytest.param("9" * 100_000, id="digits"),
    pytest.param("(" * 20_000, id="opening brackets"),
    pytest.param("(" * 499 + "x" + ")" * 499, id="nested brackets"),
    pytest.param("(1," * 249 + "x" + ")" * 249, id="nested tuples"),
    pytest.param("{" * 20_000, id="opening braces"),
    pytest.param(r"\boxed{" * 5_000, id="boxes"),
    pytest.param(r"\text{" * 3_000, id="texts"),
    pytest.param("1," * 20_000, id="commas"),
    pytest.param("a " * 50_000, id="words"),
    pytest.param("-" * 50_000, id="signs"),
  ],
)
def test_a_long_text_takes_little_time(text):
  """Parsers of nested or long texts easily need quadratic time."""
  start = time.monotonic()

  is_same_answer(text, text)
  is_same_answer(text, "x")
  is_same_answer(text[:999], "x")
  extract_answer(text)

  seconds = time.monotonic() - start
  assert seconds < 5
