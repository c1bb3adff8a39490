"""Hallucination: the model's texts are judged elsewhere, and only verdicts on exactly these texts count."""

import dataclasses
import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import Config, ModelConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import hallucination
from diffjax.evals.hallucination import Hallucination
from diffjax.evals.methods import text_overlap
from diffjax.evals.report import intervals
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder
from tests.harness.parameters import parameters

BYTES = load_tokenizer("bytes")
PARAMS = {"embedding": jnp.zeros((2, 2))}
TRAINED = Trained(
  "runs/diff at step 5",
  Config(model=ModelConfig(max_length=400)),
  None,
  PARAMS,
  BYTES,
)
NEWS = [
  {
    "document": f"The river rose by {n} metres. Nobody was hurt.",
    "summary": f"River rises by {n} metres",
  }
  for n in range(1, 6)
]
FACTS = [
  {
    "context": f"Ann is {n}.",
    "question": "How old is Ann?",
    "answers": [f"{n}", f"{n} years"],
  }
  for n in range(30, 33)
]


class Sampler:
  """The sampler's interface over a function from a prompt's text to the model's text."""

  prompts: list = []

  def __init__(self, write):
    self.write = write

  def __call__(self, model, params, *, batch_size, capacity):
    self.capacity = capacity
    return self

  def generate(self, prompts, max_new_tokens, *, stop_ids, stop):
    Sampler.prompts += prompts
    assert all(
      len(prompt) + max_new_tokens <= self.capacity for prompt in prompts
    ) and stop_ids == (255,)
    out = []
    for prompt in prompts:
      ids = []
      for token in BYTES.encode(self.write(BYTES.decode(prompt)))[
        :max_new_tokens
      ]:
        ids.append(token)
        if stop(ids):
          break
      assert b"more" not in bytes(ids)
      out.append(ids)
    return out


def write_right(text):
  """Writes the references."""
  if "Question:" in text:
    return " The " + text.split(" is ")[1].split(".")[0] + ".\nQuestion: more"
  return (
    "\nRiver rises by "
    + text.split("rose by ")[1].split()[0]
    + " metres\n\nDocument: more"
  )


@pytest.fixture
def data(tmp_path, monkeypatch):
  for name, rows in (("xsum", NEWS), ("hotpotqa", FACTS)):
    (tmp_path / f"{name}.jsonl").write_text(
      "".join(json.dumps(row) + "\n" for row in rows)
    )
  use(monkeypatch, write_right)
  monkeypatch.setattr(
    hallucination,
    "load_rouge_l",
    lambda: lambda reference, text: float(reference == text),
  )
  return tmp_path


def use(monkeypatch, write):
  Sampler.prompts = []
  monkeypatch.setattr(hallucination, "Sampler", Sampler(write))


def run(data, trained=TRAINED, **settings):
  found = list(
    Hallucination(
      **dict(sets=("xsum", "hotpotqa"), data_dir=str(data)) | settings
    ).evaluate(trained)
  )
  return {
    (figure.name, figure.at["set"]): intervals.interval(figure).value
    for figure in found
  }


def home(data):
  (path,) = (data / "judged").iterdir()
  return path


def rows_of(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def judge(data, decide=lambda prompt: "no"):
  rows = rows_of(home(data) / "judge_prompts.jsonl")
  verdicts = [
    {"id": row["id"], "sha256": row["sha256"], "verdict": decide(row["prompt"])}
    for row in rows
  ]
  (home(data) / "verdicts.jsonl").write_text(
    "".join(json.dumps(row) + "\n" for row in verdicts)
  )
  return verdicts


def test_shares_of_yes_are_proportions_and_rouge_is_not(data):
  run(data, sets=("hotpotqa",))
  judge(data)
  found = list(
    Hallucination(sets=("hotpotqa",), data_dir=str(data)).evaluate(TRAINED)
  )
  interval_of = {figure.name: intervals.interval(figure) for figure in found}
  assert set(interval_of) == {
    "free of hallucination",
    "ROUGE-L",
    "exact match",
    "empty outputs",
  }
  assert (
    interval_of["free of hallucination"].low
    == interval_of["exact match"].low
    < 0.5
  )
  assert interval_of["empty outputs"].high > 0.5 and np.isnan(
    interval_of["ROUGE-L"].high
  )


def test_generations_and_judge_prompts_are_written(data, capsys):
  found = run(data)
  assert found == {
    ("ROUGE-L", "xsum"): 1.0,
    ("empty outputs", "xsum"): 0.0,
    ("ROUGE-L", "hotpotqa"): 0.0,
    ("exact match", "hotpotqa"): 1.0,
    ("empty outputs", "hotpotqa"): 0.0,
  }
  assert home(data).name.startswith("runs-diff-at-step-5-")
  generations = {
    row["id"]: row["output"]
    for row in rows_of(home(data) / "generations.jsonl")
  }
  assert generations == {
    f"xsum/{n}": f"River rises by {n} metres" for n in range(1, 6)
  } | {f"hotpotqa/{n}": f"The {29 + n}." for n in range(1, 4)}
  prompts = rows_of(home(data) / "judge_prompts.jsonl")
  assert [row["id"] for row in prompts] == list(generations)
  for row in prompts:
    assert row["sha256"] == hashlib.sha256(row["prompt"].encode()).hexdigest()
    assert row["prompt"].strip().endswith(generations[row["id"]])
  assert (
    NEWS[0]["document"] in prompts[0]["prompt"]
    and "Summary:" in prompts[0]["prompt"]
  )
  assert (
    "Ann is 30." in prompts[5]["prompt"]
    and "How old is Ann?" in prompts[5]["prompt"]
    and "Answer:" in prompts[5]["prompt"]
  )
  assert "send these prompts to a judge" in capsys.readouterr().err
  assert [BYTES.decode(prompt) for prompt in Sampler.prompts[:1]] == [
    f"Document: {NEWS[0]['document']}\n\nSummary:"
  ]
  assert (
    BYTES.decode(Sampler.prompts[5])
    == "Ann is 30.\n\nQuestion: How old is Ann?\nAnswer:"
  )


def test_verdicts_count_and_what_was_judged_is_not_written_anew(
  data, monkeypatch
):
  run(data)
  judge(data, lambda prompt: "Yes." if "by 3 metres" in prompt else " no")
  use(monkeypatch, lambda text: "something else")
  found = run(data)
  assert (
    found["free of hallucination", "xsum"] == pytest.approx(0.8)
    and found["free of hallucination", "hotpotqa"] == 1.0
  )
  assert found["ROUGE-L", "xsum"] == 1.0 and not Sampler.prompts


def test_another_model_has_generations_of_its_own(data, monkeypatch):
  run(data)
  judge(data)
  use(monkeypatch, lambda text: "")
  again = dataclasses.replace(
    TRAINED, params={"embedding": jnp.ones((2, 2))}
  )  # trained anew under the same name
  with pytest.raises(
    UserError, match="a verdict on an older prompt of 'xsum/1'"
  ):
    run(data, again)
  assert len(Sampler.prompts) == 8
  found = run(data, dataclasses.replace(TRAINED, name="runs/other at step 5"))
  assert (
    found["empty outputs", "xsum"] == 1.0
    and ("free of hallucination", "xsum") not in found
  )
  assert len(list((data / "judged").iterdir())) == 2


def test_what_was_written_within_another_limit_is_written_anew(
  data, monkeypatch
):
  """Summaries, whose limit has changed, are written again; answers are kept."""
  run(data, summary_tokens=9)
  use(monkeypatch, write_right)
  assert run(data)["ROUGE-L", "xsum"] == 1.0
  assert len(Sampler.prompts) == len(NEWS)


@pytest.mark.parametrize(
  "change, message",
  [
    (
      lambda rows: rows[1].update(sha256="0" * 64),
      "verdicts.jsonl:2: a verdict on an older prompt of 'xsum/2'",
    ),
    (
      lambda rows: rows[1].update(id="xsum/9"),
      "verdicts.jsonl:2: unknown id 'xsum/9': it is not one of the 8 prompts",
    ),
    (
      lambda rows: rows[1].update(verdict="maybe"),
      "verdicts.jsonl:2: the verdict must be yes .a hallucination. or no; got 'maybe'",
    ),
    (
      lambda rows: rows[1].pop("verdict"),
      "verdicts.jsonl:2: the field 'verdict' is missing",
    ),
    (
      lambda rows: rows.append(rows[0]),
      "verdicts.jsonl:9: a second verdict on 'xsum/1'",
    ),
    (
      lambda rows: rows.pop(2),
      "verdicts.jsonl: holds 7 verdicts on 8 prompts; 'xsum/3' is the first without one",
    ),
    (lambda rows: rows.clear(), "verdicts.jsonl: is empty"),
  ],
)
def test_bad_verdicts(data, change, message):
  run(data)
  rows = judge(data)
  change(rows)
  (home(data) / "verdicts.jsonl").write_text(
    "".join(json.dumps(row) + "\n" for row in rows)
  )
  with pytest.raises(UserError, match=message) as error:
    run(data)
  assert "\n" not in str(error.value)


def test_samples_are_drawn_and_long_sources_lose_their_end(
  data, monkeypatch, caplog
):
  run(data, sets=("xsum",), samples=2)
  assert len(Sampler.prompts) == 2
  long = {"document": "x" * 100 + "y" * 1000, "summary": "?"}
  (data / "xsum.jsonl").write_text(json.dumps(long))
  use(monkeypatch, lambda text: "short")
  run(data, sets=("xsum",))
  (prompt,) = Sampler.prompts
  assert len(prompt) + 128 == 400 and BYTES.decode(prompt).endswith(
    "y\n\nSummary:"
  )
  (judged,) = rows_of(home(data) / "judge_prompts.jsonl")
  assert judged["prompt"].count("y" * 50) and judged["prompt"].count("y") < 300
  assert (
    "1 of 1 sources do not fit into 400 tokens and lost their end"
    in caplog.text
  )


@pytest.mark.parametrize(
  "name, rows, settings, message",
  [
    (
      "xsum",
      [{"document": "a"}],
      {},
      "xsum.jsonl:1: the field 'summary' is missing",
    ),
    (
      "hotpotqa",
      [FACTS[0], {"context": "a", "answers": []}],
      {},
      "hotpotqa.jsonl:2: the field 'question' is missing",
    ),
    (
      "hotpotqa",
      [FACTS[0] | {"answers": []}],
      {},
      "hotpotqa.jsonl:1: the field 'answers' must be a list of strings, and not empty",
    ),
    (
      "hotpotqa",
      [FACTS[0] | {"answers": [3]}],
      {},
      "hotpotqa.jsonl:1: the field 'answers' must be a list of strings",
    ),
    (
      "hotpotqa",
      [FACTS[0] | {"question": "long " * 100}],
      {},
      "hotpotqa.jsonl:1: the prompt without its source and the output take 5.. tokens",
    ),
    ("xsum", [], {}, "xsum.jsonl: is empty"),
    ("xsum", None, {}, "xsum.jsonl: cannot be read"),
    (
      "xsum",
      NEWS,
      dict(data_dir=""),
      "set.hallucination.data_dir must name the directory",
    ),
    (
      "xsum",
      NEWS,
      dict(max_tokens=500),
      "set.hallucination.max_tokens = 500: the model takes at most 400",
    ),
    ("xsum", NEWS, dict(samples=0), "set.hallucination.samples = 0"),
    (
      "xsum",
      NEWS,
      dict(judge_dir="/dev/null"),
      "cannot write /dev/null/.*set.hallucination.judge_dir chooses another place",
    ),
  ],
)
def test_bad_input(data, name, rows, settings, message):
  (data / f"{name}.jsonl").unlink()
  if rows is not None:
    (data / f"{name}.jsonl").write_text(
      "".join(json.dumps(row) + "\n" for row in rows)
    )
  with pytest.raises(UserError, match=message) as error:
    run(data, sets=(name,), **settings)
  assert "\n" not in str(error.value)


def test_exact_match():
  assert text_overlap.is_match(
    "The  Eiffel-Tower!", ["x", "eiffeltower"]
  ) and not text_overlap.is_match("Eiffel", ["Eiffel Tower"])
  assert text_overlap.is_match("A dog", ["dog"]) and not text_overlap.is_match(
    "", ["dog"]
  )


def test_exact_match_ignores_the_punctuation_of_every_script():
  for text, reference in (
    ("«Киев».", "киев"),
    ("北京。", "北京"),
    ("“Paris”…", "Paris"),
    ("¿Qué?", "Qué"),
    ("２０２４", "2024"),
    ("STRASSE", "Straße"),
  ):
    assert text_overlap.is_match(text, [reference])
  for text, reference in (("Киев", "Минск"), ("", "Киев"), ("é", "e")):
    assert not text_overlap.is_match(text, [reference])


def test_rouge_l_of_ascii_texts_is_that_of_rouge_score():
  rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
  original = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
  rouge_l = text_overlap.load_rouge_l()
  rng = np.random.default_rng(0)
  words = "Dogs running runner's U.S.A. 3.5% it_is DON'T a,b x2 ties _ -- 1st"
  characters = [chr(code) for code in range(128)]
  for _ in range(100):
    texts = [
      " ".join(rng.choice(words.split(), 8))
      + "".join(rng.choice(characters, 9))
      for _ in range(2)
    ]
    expected = original.score(*texts)["rougeL"].fmeasure
    assert rouge_l(*texts) == expected, texts


@pytest.mark.parametrize(
  ("reference", "text", "expected"),
  [
    ("Сегодня в Киеве дождь", "Сегодня в Киеве дождь", 1.0),
    ("Киев 2024", "Минск 2024", 0.5),
    ("КИЕВ", "киев", 1.0),
    ("今天下雨", "今天下雨", 1.0),
    # Three of four characters, and of three in the other
    ("今天下雨", "今天雨", 2 * (3 / 4) / (3 / 4 + 1)),
    ("东京タワー", "東京タワー", 0.8),
    ("café", "café", 1.0),
    ("café", "cafe", 0.0),
    ("２０２４", "2024", 1.0),
    # A vowel sign belongs to its word or letter
    ("हिन्दी में", "हिन्दी है", 0.5),
    ("กำ", "ก", 0.0),
    ("שָׁלוֹם", "שָׁלוֹם", 1.0),
    ("မြန်မာ", "မြန်မာ။", 1.0),
    ("!?", "…", 0.0),
  ],
)
def test_rouge_l_of_other_scripts(reference, text, expected):
  pytest.importorskip("rouge_score")
  rouge_l = text_overlap.load_rouge_l()
  assert rouge_l(reference, text) == pytest.approx(expected)
  assert rouge_l(text, reference) == pytest.approx(expected)


def test_rouge_l_of_known_texts(monkeypatch):
  pytest.importorskip("rouge_score")
  rouge_l = text_overlap.load_rouge_l()
  # The longest common subsequence of "police killed the gunman" and "police kill the gunman": 3 words of 4, and "killed" has the stem kill
  assert rouge_l("police killed the gunman", "police kill the gunman") == 1.0
  assert rouge_l(
    "police killed the gunman", "the gunman police killed"
  ) == pytest.approx(0.5)
  assert rouge_l("a b c d", "a x c y z d") == pytest.approx(
    2 * (3 / 4) * (3 / 6) / (3 / 4 + 3 / 6)
  )


def test_it_needs_rouge_score(monkeypatch):
  import sys

  monkeypatch.setitem(sys.modules, "rouge_score", None)
  with pytest.raises(
    UserError,
    match=r"ROUGE-L needs rouge-score, .*pip install 'diffjax\[eval\]'",
  ):
    list(Hallucination().evaluate(TRAINED))


def test_a_real_model(data, monkeypatch):
  from diffjax.inference.sampler import Sampler

  monkeypatch.setattr(hallucination, "Sampler", Sampler)
  config = ModelConfig(
    num_layers=1,
    embed_dim=16,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=16,
    max_length=256,
  )
  model = Decoder(config)
  params = parameters(model, jnp.zeros((1, 1), jnp.int32))
  trained = Trained("real", Config(model=config), model, params, BYTES)
  found = run(
    data,
    trained,
    sets=("hotpotqa",),
    samples=2,
    answer_tokens=8,
    batch_tokens=256,
  )
  assert (
    found["exact match", "hotpotqa"] == 0.0
    and len(rows_of(home(data) / "generations.jsonl")) == 2
  )
