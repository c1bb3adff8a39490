"""Token ids that users pass are integers of the vocabulary."""

import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.inference.token_ids import is_integer, validated_token_ids


@pytest.mark.parametrize(
  "ids",
  [
    [0, 99],
    (0, 99),
    range(0, 100, 99),
    [np.uint8(0), jnp.int32(99)],
    np.array([0, 99], "int8"),
    np.array([0, 99], "uint16"),
    np.array([0, 99], "uint64"),
    jnp.array([0, 99], "int8"),
    jnp.array([0, 99], "int32"),
    jnp.array([0, 99], "uint32"),
  ],
  ids=repr,
)
def test_integers_of_every_type_are_accepted(ids):
  validated = validated_token_ids(ids, vocab_size=100, name="ids")

  assert validated.dtype == np.int32
  assert validated.tolist() == [0, 99]


def test_a_type_without_the_size_of_the_vocabulary_is_accepted():
  """An int4 is at most 7, so it cannot hold the vocabulary's size of 100."""
  ids = jnp.array([0, 7], jnp.int4)

  validated = validated_token_ids(ids, vocab_size=100, name="ids")

  assert validated.tolist() == [0, 7]


@pytest.mark.parametrize(
  "ids",
  [
    pytest.param([], id="list"),
    pytest.param(np.array([]), id="NumPy array"),
    pytest.param(jnp.zeros(0, jnp.int8), id="JAX array"),
  ],
)
def test_empty_sequences_are_accepted(ids):
  validated = validated_token_ids(ids, vocab_size=100, name="ids")

  assert validated.shape == (0,)


@pytest.mark.parametrize(
  ("token", "text"),
  [
    (100, "100"),
    (-1, "-1"),
    (2**63, str(2**63)),
    (2**80, str(2**80)),
    (97.9, "97.9"),
    (97.0, "97.0"),
    (float("nan"), "nan"),
    (True, "True"),
    (np.True_, "True"),
    (None, "None"),
    ("a", "'a'"),
    ([1], r"\[1\]"),
    (np.int16(100), "100"),
    (jnp.int8(-1), "-1"),
    (jnp.array(True), "True"),
  ],
  ids=repr,
)
def test_the_error_names_the_first_wrong_id(token, text):
  """The wrong id is at position 2, and another one is behind it."""
  message = (
    f"^prompt 3 has {text} at position 2: token ids are integers from 0 to 99,"
    " since config.model.vocab_size = 100$"
  )
  with pytest.raises(UserError, match=message):
    validated_token_ids([5, 6, token, -7], vocab_size=100, name="prompt 3")


@pytest.mark.parametrize(
  ("ids", "message"),
  [
    (np.array([5, 100]), "has 100 at position 1"),
    (np.array([5, -1], np.int8), "has -1 at position 1"),
    (np.array([5, 2**64 - 1], np.uint64), f"has {2**64 - 1} at position 1"),
    (jnp.array([5, 300], jnp.uint16), "has 300 at position 1"),
    (np.array([5.0, 6.0]), "has 5.0 at position 0"),
    (jnp.array([5.5]), "has 5.5 at position 0"),
    (np.array([False, True]), "has False at position 0"),
  ],
  ids=repr,
)
def test_arrays_with_wrong_ids_are_rejected(ids, message):
  """Ids of a vocabulary of 100 tokens are integers from 0 to 99."""
  with pytest.raises(UserError, match=f"^ids {message}"):
    validated_token_ids(ids, vocab_size=100, name="ids")


@pytest.mark.parametrize(
  ("ids", "message"),
  [
    (np.array([[5]]), r"is an array of shape \(1, 1\)"),
    (np.array(5), r"is an array of shape \(\)"),
    (5, "is 5: pass a sequence"),
    ({5}, r"is \{5\}: pass a sequence"),
    ("text", "has 't' at position 0"),
  ],
  ids=repr,
)
def test_other_values_than_sequences_of_ids_are_rejected(ids, message):
  with pytest.raises(UserError, match=f"^ids {message}"):
    validated_token_ids(ids, vocab_size=100, name="ids")


@pytest.mark.parametrize(
  "value", [0, -5, np.int8(3), np.uint64(3), jnp.int32(3)], ids=repr
)
def test_is_integer_accepts_integers_of_every_library(value):
  assert is_integer(value)


@pytest.mark.parametrize(
  "value",
  [True, np.False_, jnp.array(True), 2.0, np.float32(2), "2", None],
  ids=repr,
)
def test_is_integer_rejects_booleans_and_other_types(value):
  assert not is_integer(value)
