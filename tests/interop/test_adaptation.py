"""A Llama becomes a DIFF V2 or DEX model with the same outputs.

The recipes llama_1b_dex and llama_1b_gda then train it.
"""

import pathlib
import re
import shlex
import shutil
from typing import NamedTuple

import chex
import jax
import numpy as np
import pytest
from absl import flags
from flax.traverse_util import flatten_dict
from ml_collections import config_flags

from diffjax.config import Config, UserError, from_config_dict
from diffjax.inference import trained
from diffjax.inference.sampler import Sampler
from diffjax.interop import llama, unilm, workdir
from diffjax.interop.adapt import adapted
from diffjax.interop.layout import Model
from diffjax.parallel.mesh import make_mesh
from diffjax.training import loop, session
from diffjax.training.program import build
from tests.harness.tiers import full
from tests.interop import transformer_reference as parts
from tests.interop.small_models import (
  convert,
  make_model,
  model_logits,
  write_llama,
)

# The same outputs.


def llama_logits(tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
  """Returns the logits of one row by the Llama itself, in float64.

  Args:
    tensors: the tensors of `write_llama`.
    ids: token ids of shape [tokens].
  """
  exact = {name: value.astype(np.float64) for name, value in tensors.items()}
  embedding = exact["model.embed_tokens.weight"]
  eps = 1e-6
  x = embedding[ids]
  for layer in range(2):
    prefix = f"model.layers.{layer}."
    h = parts.rms_norm(x, exact[f"{prefix}input_layernorm.weight"], eps)
    q = h @ exact[f"{prefix}self_attn.q_proj.weight"].T
    k = h @ exact[f"{prefix}self_attn.k_proj.weight"].T
    v = h @ exact[f"{prefix}self_attn.v_proj.weight"].T
    q = parts.rotate(q.reshape(-1, 4, 8), 500.0, interleaved=False)
    k = parts.rotate(k.reshape(-1, 2, 8), 500.0, interleaved=False)
    v = v.reshape(-1, 2, 8)
    heads = []
    for head in range(4):
      # Two query heads share a key/value head.
      kv_head = head // 2
      heads.append(parts.attend(q[:, head], k[:, kv_head], v[:, kv_head]))
    out = exact[f"{prefix}self_attn.o_proj.weight"]
    x = x + np.concatenate(heads, axis=-1) @ out.T

    gain = exact[f"{prefix}post_attention_layernorm.weight"]
    x = x + parts.swiglu(
      parts.rms_norm(x, gain, eps),
      exact[f"{prefix}mlp.gate_proj.weight"],
      exact[f"{prefix}mlp.up_proj.weight"],
      exact[f"{prefix}mlp.down_proj.weight"],
    )
  hidden = parts.rms_norm(x, exact["model.norm.weight"], eps)
  # A tied Llama has no lm_head.
  return hidden @ exact.get("lm_head.weight", embedding).T


@pytest.mark.parametrize(
  ("attention", "num_noise_heads", "is_tied", "relative_error"),
  [
    pytest.param("softmax", None, True, 2e-6, id="softmax"),
    pytest.param("diff_v2", None, False, 2e-6, id="diff_v2"),
    # With shared noise maps, the same numbers are added and subtracted, so
    # there are more rounding errors.
    pytest.param("diff_v2", 2, True, 4e-6, id="diff_v2, shared noise maps"),
    pytest.param("dex", None, False, 2e-6, id="dex"),
  ],
)
def test_an_adapted_llama_has_the_same_logits(
  attention, num_noise_heads, is_tied, relative_error, tmp_path
):
  """An adapted model has another attention, which training can then use."""
  tensors = write_llama(tmp_path, is_tied=is_tied)
  token_ids = np.random.default_rng(0).integers(0, 128, size=(2, 20))

  model = adapted(llama.read(str(tmp_path)), attention, num_noise_heads)

  logits = model_logits(model, token_ids)
  expected = np.stack([llama_logits(tensors, row) for row in token_ids])
  atol = relative_error * np.abs(expected).max()
  chex.assert_trees_all_close(logits, expected, rtol=0, atol=atol)
  assert model.config.attention == attention
  assert model.config.num_noise_heads == num_noise_heads
  assert model.config.tie_embeddings is is_tied
  assert not model.config.head_norm


def test_an_adapted_workdir_has_the_same_logits(tmp_path):
  """A Transformer with biases becomes a DIFF V2 with two noise maps."""
  model = make_model("softmax", projection_biases=True)
  workdir.write(str(tmp_path / "run"), model)

  result = convert(
    f"--from=diffjax:{tmp_path}/run",
    f"--to=diffjax:{tmp_path}/adapted",
    "--attention=diff_v2",
    "--num_noise_heads=2",
  )

  assert result.returncode == 0, result.stderr
  assert "--config.model.num_noise_heads=2" in result.stdout
  adapted_model = workdir.read(str(tmp_path / "adapted"))
  token_ids = np.random.default_rng(0).integers(0, 128, size=(2, 20))
  logits = model_logits(adapted_model, token_ids)
  expected = model_logits(model, token_ids)
  atol = 5e-6 * np.abs(expected).max()
  chex.assert_trees_all_close(logits, expected, rtol=0, atol=atol)


def test_an_adapted_model_is_written_in_the_authors_layout(tmp_path):
  """A layout is a file format of models, with its own names of tensors."""
  write_llama(tmp_path / "llama")
  model = adapted(llama.read(str(tmp_path / "llama")), "diff_v2")

  unilm.write(str(tmp_path / "unilm"), model, "float32")

  read = unilm.read(str(tmp_path / "unilm"))
  chex.assert_trees_all_equal(read.params, model.params)


# Models and flags that are rejected.


def assert_adaptation_fails(
  directory: pathlib.Path, model: Model, arguments: list[str], message: str
) -> None:
  """Asserts that the command prints an error and writes nothing.

  Args:
    directory: an empty directory.
    model: the model.
    arguments: further arguments of the command.
    message: a regular expression that the error begins with.
  """
  workdir.write(str(directory / "run"), model)

  result = convert(
    f"--from=diffjax:{directory / 'run'}",
    f"--to=diffjax:{directory / 'out'}",
    *arguments,
  )

  assert result.returncode != 0
  assert not result.stdout
  assert not (directory / "out").exists()
  assert re.match(f"error: {message}", result.stderr.strip()), result.stderr


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    pytest.param(
      {"attention": "diff"},
      "--attention=diff_v2: only a Transformer, attention 'softmax', can be"
      " adapted; this model has 'diff'",
      id="a DIFF Transformer",
    ),
    pytest.param(
      {"attention": "softmax", "head_norm": True},
      "--attention=diff_v2: this model has a head norm",
      id="a head norm",
    ),
  ],
)
def test_models_other_than_a_plain_transformer_are_not_adapted(
  fields, message, tmp_path
):
  """The command prints the message, and writes nothing."""
  assert_adaptation_fails(
    tmp_path,
    model=make_model(num_layers=1, **fields),
    arguments=["--attention=diff_v2"],
    message=message,
  )


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    pytest.param(
      ["--num_noise_heads=2", "--attention=dex"],
      "--num_noise_heads=2: only --attention=diff_v2 has noise maps",
      id="dex",
    ),
    pytest.param(
      ["--num_noise_heads=2"],
      "--num_noise_heads=2: pass --attention=diff_v2 with it",
      id="no attention",
    ),
    pytest.param(
      ["--num_noise_heads=3", "--attention=diff_v2"],
      "--num_noise_heads=3: must divide the model's 4 heads and be a multiple"
      " of its 2 key/value heads; it can be 2, 4$",
      id="three",
    ),
  ],
)
def test_a_wrong_number_of_noise_heads_is_rejected(
  arguments, message, tmp_path
):
  """Noise heads divide the 4 heads into groups that share a noise map."""
  assert_adaptation_fails(
    tmp_path,
    model=make_model("softmax", num_layers=1),
    arguments=arguments,
    message=message,
  )


def test_an_attention_that_a_transformer_cannot_get_is_rejected():
  """A gate would change the outputs of the heads."""
  model = make_model("softmax")

  message = (
    "--attention=gated: a Transformer becomes one of softmax, diff_v2, dex"
  )
  with pytest.raises(UserError, match=message):
    adapted(model, attention="gated")


# The recipes.

ADAPTATION_FLAGS = {
  "llama_1b_dex": ["--attention=dex"],
  "llama_1b_gda": ["--attention=diff_v2", "--num_noise_heads=2"],
}
RECIPES = ["llama_1b_dex", *full(["llama_1b_gda"])]
SMALL_RUN_FLAGS = [
  "--config.data.length=16",
  "--config.train.steps=3",
  "--config.train.batch_size=16",
  "--config.train.accumulation=2",
  "--config.train.checkpoint_interval=2",
  "--config.train.sample_tokens=0",
  "--config.eval.interval=0",
  "--config.optimizer.warmup_steps=0",
]


class Recipe(NamedTuple):
  """A recipe for a small Llama, and its run of three steps.

  Attributes:
    config: the recipe's config with the flags that the conversion printed.
    initial_workdir: has the converted Llama.
    trained_workdir: has the checkpoints of steps 2 and 3.
    trained_names: the names of the parameters that the recipe trains.
  """

  config: Config
  initial_workdir: pathlib.Path
  trained_workdir: pathlib.Path
  trained_names: set[str]


def parse_config(arguments: list[str]) -> Config:
  """Returns the config that `diffjax.train` makes of its arguments."""
  flag_values = flags.FlagValues()
  holder = config_flags.DEFINE_config_file(
    "config", flag_values=flag_values, sys_argv=arguments
  )
  flag_values(["train", *arguments])
  return from_config_dict(holder.value)


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request, tmp_path_factory):
  """Converts a Llama and trains it by a recipe, as its docstring says.

  Runs use two devices, because programs for all eight take longer to compile.
  """
  name = request.param
  directory = tmp_path_factory.mktemp(name)
  write_llama(directory / "llama")
  words = [f"w{index % 120 + 1}" for index in range(3000)]
  (directory / "text.txt").write_text(" ".join(words))

  result = convert(
    f"--from=llama:{directory / 'llama'}",
    f"--to=diffjax:{directory / 'start'}",
    *ADAPTATION_FLAGS[name],
  )
  assert result.returncode == 0, result.stderr
  last_line = result.stdout.splitlines()[-1]
  printed_flags = shlex.split(last_line.partition(": ")[2])

  source = f"text:{directory}/text.txt"
  config = parse_config(
    [
      f"--config=configs/{name}.py",
      *printed_flags,
      f"--config.data.source={source}",
      f"--config.data.validation_source={source}",
      f"--config.data.prepared_dir={directory / 'rows'}",
      *SMALL_RUN_FLAGS,
    ]
  )

  def make_mesh_of_two(mesh_config):
    return make_mesh(mesh_config, jax.devices()[:2])

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(session, "make_mesh", make_mesh_of_two)
    loop.train(config, str(directory / "run"))
    yield Recipe(
      config,
      initial_workdir=directory / "start",
      trained_workdir=directory / "run",
      trained_names=set(config.optimizer.trained.split(",")),
    )


def test_a_recipe_changes_only_the_parameters_that_it_names(recipe):
  """A recipe trains some parameters of an adapted Llama, and freezes others."""
  before = flatten_dict(trained.load(recipe.initial_workdir).params)
  after = flatten_dict(trained.load(recipe.trained_workdir).params)

  assert before.keys() == after.keys()
  for path, old in before.items():
    is_changed = np.asarray(old) != np.asarray(after[path])
    if path[-1] in recipe.trained_names:
      # The first axis is the layer. Every layer has changed.
      num_layers = len(is_changed)
      assert is_changed.reshape(num_layers, -1).any(axis=1).all(), path
    else:
      assert not is_changed.any(), path


def test_the_optimizer_has_moments_only_of_trained_parameters(recipe):
  """Moments of frozen parameters would take memory without effect."""
  program = build(recipe.config, make_mesh(recipe.config.mesh))

  opt_state = program.abstract_state.opt_state
  names_with_moments = set()
  for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
    # Moments have the shape of their parameter. Counters have fewer axes.
    if leaf.ndim > 1:
      names_with_moments.add(path[-1].key)
  assert names_with_moments == recipe.trained_names


@pytest.mark.full
def test_a_resumed_recipe_equals_an_unbroken_one(recipe, tmp_path):
  """The run has three steps, and is repeated from the checkpoint of step 2."""
  run = shutil.copytree(recipe.trained_workdir, tmp_path / "run")
  # A run resumes from its last checkpoint.
  shutil.rmtree(run / "checkpoints/3")

  loop.train(recipe.config, str(run))

  resumed = trained.load(run).params
  unbroken = trained.load(recipe.trained_workdir).params
  chex.assert_trees_all_equal(resumed, unbroken)


@pytest.mark.full
def test_a_trained_recipe_generates_its_most_likely_tokens(recipe):
  """The sampler is greedy, and reads one new token at a time with a cache.

  The expected tokens are computed from the whole sequence, without a cache.
  """
  loaded = trained.load(recipe.trained_workdir)
  prompt = [3, 4, 5]
  num_new_tokens = 8

  (new_tokens,) = Sampler(loaded).generate([prompt], num_new_tokens)

  model = Model(loaded.config.model, loaded.params, loaded.tokenizer)
  (logits,) = model_logits(model, [[*prompt, *new_tokens]])
  most_likely_next = logits.argmax(axis=-1)
  for index, token in enumerate(new_tokens):
    position = len(prompt) + index
    assert token == most_likely_next[position - 1]
  assert len(new_tokens) == num_new_tokens


def test_a_run_cannot_resume_from_parameters_alone(recipe):
  """A converted workdir has no state of an optimizer to resume from."""
  converted = str(recipe.initial_workdir)

  message = (
    "parameters alone.*another --workdir and"
    f" --config.train.init_from={converted}$"
  )
  with pytest.raises(UserError, match=message):
    loop.train(recipe.config, converted)
