"""Mathematics: models with a known answer get their known scores, and prompts are those of fine-tuning."""

import dataclasses
import json

import jax
import pytest

from diffjax.config import Config, DataConfig, ModelConfig, UserError
from diffjax.data.document import Document
from diffjax.data.packing import Tokenize
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import mathematics
from diffjax.evals.mathematics import Mathematics
from diffjax.evals.report import intervals
from diffjax.inference.trained import Trained
from diffjax.parallel.mesh import make_mesh
from diffjax.training.checkpoint import Checkpoints
from diffjax.training.program import build
from tests.harness import in_process

TOKENIZER = load_tokenizer("bytes")
GSM8K = [
  {
    "question": f"What is {a} + {a}?",
    "answer": f"{a} + {a} = <<{a}+{a}={2 * a}>>{2 * a}.\n#### {2 * a}",
  }
  for a in range(3, 9)
]
MATH = [
  {
    "problem": f"Half of {a}?",
    "solution": rf"It is $\boxed{{\frac{{{a}}}{{2}}}}$.",
    "level": "Level 1",
  }
  for a in range(1, 5)
]
MATH_500 = [
  {
    "problem": f"Half of {a}?",
    "solution": "See above.",
    "answer": rf"\frac{{{a}}}{{2}}",
  }
  for a in range(1, 5)
]


def write(path, records):
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return str(path)


@pytest.fixture
def files(tmp_path):
  return (
    write(tmp_path / "gsm8k.jsonl", GSM8K),
    write(tmp_path / "math.jsonl", MATH),
    write(tmp_path / "math500.jsonl", MATH_500),
  )


@pytest.fixture
def trained():
  config = Config(
    model=ModelConfig(max_length=700),
    data=DataConfig(prompt_template="Q: {prompt}\nA:"),
  )
  return Trained("a model", config, None, None, TOKENIZER)


@pytest.fixture
def play(monkeypatch):
  """Evaluates with a sampler that gives the given answers."""

  def play(trained, settings, answer):
    asked = []

    class Sampler:
      def __init__(self, model, params, *, batch_size, capacity):
        self.capacity = capacity

      def generate(self, prompts, max_new_tokens, *, stop_ids, stop):
        assert (
          max(map(len, prompts)) + max_new_tokens
          <= self.capacity
          <= trained.config.model.max_length
        )
        asked.extend(TOKENIZER.decode(prompt) for prompt in prompts)
        return [
          self.write(TOKENIZER.decode(prompt), max_new_tokens, stop)
          for prompt in prompts
        ]

      def write(self, prompt, max_new_tokens, stop):
        tokens = []
        for token in TOKENIZER.encode(answer(prompt))[:max_new_tokens]:
          tokens.append(token)
          if stop(tokens):
            break
        return tokens

    monkeypatch.setattr(mathematics, "Sampler", Sampler)
    found = {
      (row["name"], row["at"]["file"]): row
      for row in intervals.compare(settings.evaluate(trained))
    }
    return found, asked

  return play


def oracle(prompt):
  """Writes the right answers in other words."""
  number = int(prompt.rpartition("Q: ")[2].split()[2].rstrip("?"))
  return (
    f"Let me see. 17 + 4 ... The answer is {2 * number}.0"
    if "What" in prompt.rpartition("Q: ")[2]
    else rf"So \boxed{{{number / 2}}}"
  )


def test_an_oracle_scores_1_and_its_opposite_0(play, trained, files):
  found, asked = play(
    trained, Mathematics(files=",".join(files), new_tokens=100), oracle
  )
  assert {key: row["value"] for key, row in found.items()} == {
    **{
      (name, file): 1.0
      for name in ("accuracy", "ended")
      for file in ("gsm8k", "math", "math500")
    },
    ("accuracy", "mean"): 1.0,
  }
  assert (
    found["accuracy", "gsm8k"]["units"] == 6
    and found["accuracy", "mean"]["units"] == 14
  )
  assert asked[0] == "Q: What is 3 + 3?\nA:"
  for wrong in ("The answer is 1000.", "", "nothing", r"\boxed{x}"):
    found, _ = play(
      trained,
      Mathematics(files=",".join(files), new_tokens=100),
      lambda prompt: wrong,  # noqa: B023
    )
    assert all(
      row["value"] == 0
      for (name, _), row in found.items()
      if name == "accuracy"
    )


def test_the_mean_weights_files_alike(play, trained, files):
  found, _ = play(
    trained,
    Mathematics(files=",".join(files[:2]), new_tokens=100),
    lambda prompt: oracle(prompt) if "What" in prompt else "",
  )
  assert (
    found["accuracy", "gsm8k"]["value"],
    found["accuracy", "math"]["value"],
  ) == (1.0, 0.0)
  assert found["accuracy", "mean"]["value"] == pytest.approx(0.5)
  assert (
    found["accuracy", "mean"]["low"] < 0.5 < found["accuracy", "mean"]["high"]
  )
  assert (
    found["accuracy", "gsm8k"]["low"] < 0.7
    and found["accuracy", "math"]["high"] > 0.3
  )


def test_what_follows_another_question_does_not_count(play, trained, files):
  own = lambda prompt: (
    oracle("Q: " + prompt.partition(": ")[2])
    + "\n\nExercise 9: What is 1 + 1?\nA: 2."
  )
  config = dataclasses.replace(
    trained.config, data=DataConfig(prompt_template="Exercise 9: {prompt}\nA:")
  )
  found, asked = play(
    dataclasses.replace(trained, config=config),
    Mathematics(files=",".join(files), new_tokens=200),
    own,
  )
  assert asked[0] == "Exercise 9: What is 3 + 3?\nA:" and all(
    row["value"] == 1 for row in found.values()
  )
  bare = lambda prompt: f"{2 * int(prompt.split()[4])}\nExercise 9: What"
  found, _ = play(
    dataclasses.replace(trained, config=config),
    Mathematics(files=files[0], new_tokens=200),
    bare,
  )
  assert found["accuracy", "gsm8k"]["value"] == 1, "9 is of the template"


def test_answers_that_do_not_end(play, trained, files):
  found, _ = play(
    trained,
    Mathematics(files=files[0], new_tokens=50),
    lambda prompt: "3" * 200 if "3 + 3" in prompt else "no",
  )
  assert found["ended", "gsm8k"]["value"] == pytest.approx(5 / 6)


def test_demonstrations_stand_before_questions(play, trained, files):
  settings = Mathematics(
    files=files[0], shots=2, shots_file=files[2], questions=3, new_tokens=100
  )
  found, asked = play(trained, settings, oracle)
  shots = "Q: Half of 1?\nA:See above.\n\nQ: Half of 2?\nA:See above.\n\n"
  assert asked == [
    f"{shots}Q: What is {number} + {number}?\nA:" for number in (3, 4, 5)
  ]
  assert found["accuracy", "gsm8k"]["value"] == 1.0


def test_a_demonstration_may_not_be_a_scored_question(play, trained, files):
  settings = Mathematics(
    files=",".join(files[:2]), shots=1, shots_file=files[2], new_tokens=100
  )
  with pytest.raises(
    UserError,
    match="math500.jsonl:1: this demonstration is also a scored question .*"
    "math.jsonl:1",
  ):
    play(trained, settings, oracle)
  settings = dataclasses.replace(settings, files=files[0])
  _, asked = play(trained, settings, oracle)
  assert all(prompt.count("Half of 1?") == 1 for prompt in asked)


def test_prompts_are_those_of_fine_tuning(trained):
  """They are, token for token, the text before an answer in a training row."""
  template = DataConfig().prompt_template
  example = Tokenize("bytes")(
    Document("4", False, template.replace("{prompt}", "2 + 2?"))
  )
  ids = TOKENIZER.encode_prompt(
    mathematics._format_question(template, "2 + 2?")
  )
  assert ids == example.tokens[: example.prompt_length].tolist()


@pytest.mark.parametrize(
  ("record", "message"),
  [
    (
      {"answer": "5"},
      "a.jsonl:2: the field 'question' or 'problem' is missing; there are 'answer'",
    ),
    (
      {"question": "5?"},
      "a.jsonl:2: the field 'answer' or 'solution' is missing; there are 'question'",
    ),
    (
      {"question": "5?", "answer": ["5"]},
      r"a.jsonl:2: the field 'answer' must be a string; got \"\['5'\]\"",
    ),
    (
      {"question": 5, "answer": True},
      "a.jsonl:2: the field 'answer' must be a string; got 'True'",
    ),
    (
      {"question": "5?", "answer": " "},
      "a.jsonl:2: there is no final answer in ' '",
    ),
    (
      {"question": "5?", "answer": r"\boxed{}"},
      "a.jsonl:2: there is no final answer",
    ),
    (
      {"question": "x" * 700, "answer": "5"},
      "a.jsonl:2: a prompt of 707 tokens.*new_tokens = 50 are more than the model's 700",
    ),
  ],
)
def test_bad_records(tmp_path, trained, record, message):
  path = write(tmp_path / "a.jsonl", [GSM8K[0], record])
  with pytest.raises(UserError, match=message) as caught:
    list(Mathematics(files=path, new_tokens=50).evaluate(trained))
  assert "\n" not in str(caught.value)


def test_numbers_are_answers_too(tmp_path):
  assert (
    mathematics.read(
      write(tmp_path / "aime.jsonl", [{"problem": "?", "answer": 25}])
    )[0].answer
    == "25"
  )


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"files": " ,"}, "set.mathematics.files names JSONL files"),
    ({"files": "/nowhere/a.jsonl"}, "/nowhere/a.jsonl: cannot be read"),
    ({"shots": 1}, "set.mathematics.shots_file must name a file"),
    (
      {"shots": 9, "shots_file": "math.jsonl"},
      "set.mathematics.shots = 9: .*math.jsonl has 4 records",
    ),
    ({"shots": -1}, "set.mathematics.shots = -1: must be at least 0"),
    ({"new_tokens": 0}, "set.mathematics.new_tokens = 0: must be at least 1"),
    ({"files": "a/b.jsonl,c/b.jsonl"}, "two files have the same name"),
  ],
)
def test_bad_settings(tmp_path, trained, files, change, message):
  if change.get("shots_file"):
    change = {**change, "shots_file": str(tmp_path / change["shots_file"])}
  with pytest.raises(UserError, match=message):
    list(
      dataclasses.replace(
        Mathematics(files=",".join(files)), **change
      ).evaluate(trained)
    )


def test_the_command(files, tmp_path):
  """python -m diffjax.evaluate --suite=mathematics, with an untrained model, and with a bad record."""
  config = Config(
    model=ModelConfig(
      num_layers=1,
      embed_dim=16,
      num_heads=1,
      num_kv_heads=1,
      head_dim=8,
      ffn_dim=16,
      max_length=256,
    )
  )
  program = build(config, make_mesh(config.mesh, jax.devices()[:1]))
  with Checkpoints(tmp_path / "run", keep=1) as checkpoints:
    checkpoints.save(
      0, program.init(), data_state={}, config=config.to_dict(), scores={}
    )
    checkpoints.wait()

  def run(*args):
    return in_process.call(
      "diffjax.evaluate",
      "--suite=mathematics",
      f"--workdir={tmp_path}/run",
      *args,
    )

  result = run(
    f"--set.mathematics.files={files[0]},{files[1]}",
    "--set.mathematics.new_tokens=9",
    "--set.mathematics.questions=3",
  )
  assert result.returncode == 0, result.stderr
  found = json.loads(
    (tmp_path / "run" / "evals" / "mathematics.json").read_text()
  )
  assert [
    (row["name"], row["at"]["file"], row["units"]) for row in found["figures"]
  ] == [
    ("accuracy", "gsm8k", 3),
    ("ended", "gsm8k", 3),
    ("accuracy", "math", 3),
    ("ended", "math", 3),
    ("accuracy", "mean", 6),
  ]
  result = run(
    f"--set.mathematics.files={write(tmp_path / 'bad.jsonl', [GSM8K[0], {'question': '?'}])}",
    "--set.mathematics.new_tokens=9",
  )
  assert result.returncode == 1 and result.stderr.splitlines(keepends=True)[
    -1
  ] == (
    f"error: {tmp_path}/bad.jsonl:2: the field 'answer' or 'solution' is missing; there are 'question'\n"
  )
