"""The operations inside `shard_map` and under automatic partitioning, on four fake devices in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import chex, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from diffjax.ops.cross_entropy import fused_cross_entropy, per_token_cross_entropy, reference_cross_entropy
from diffjax.ops.diff_attention import chunked, diff_attention

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
keys = iter(jax.random.split(jax.random.key(0), 9))
normal = lambda *shape: jax.random.normal(next(keys), shape)
close = lambda a, b: chex.assert_trees_all_close(a, b, rtol=1e-4, atol=1e-4)
shard = lambda f, specs, out: jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out)

hidden, embedding, weights = normal(8, 37, 16), normal(50, 16), jnp.ones((8, 37))
targets = jax.random.randint(next(keys), (8, 37), 0, 50)
local = lambda h, e, w, t: fused_cross_entropy(h, e, t, w, z_loss=1e-2, chunk=16)[0]
data = P("data")
mapped = shard(lambda *a: jax.lax.psum(local(*a), "data"), (data, P(), data, data), P())
expected = jax.value_and_grad(lambda h, e, w: reference_cross_entropy(h, e, targets, w, z_loss=1e-2)[0], (0, 1, 2))(hidden, embedding, weights)
compiled = jax.jit(jax.value_and_grad(mapped, (0, 1, 2))).lower(hidden, embedding, weights, targets).compile()
close(compiled(hidden, embedding, weights, targets), expected)
program = compiled.as_text()
assert " while(" in program
# The loss and the embedding's gradient are summed over the mesh after the loop, never inside it: a loop's body is a computation apart.
entry = program[program.index("ENTRY"):]
assert program.count(" all-reduce(") == entry.count(" all-reduce(") > 0 and "all-gather" not in program
nll = jax.jit(shard(lambda h, e, t: per_token_cross_entropy(h, e, t, chunk=16), (data, P(), data), data))(hidden, embedding, targets)
close(nll.sum(), reference_cross_entropy(hidden, embedding, targets, weights)[0])

put = lambda x: jax.device_put(x, NamedSharding(mesh, data))
arguments = put(hidden), embedding, put(weights), put(targets)
compiled = jax.jit(jax.value_and_grad(lambda *a: fused_cross_entropy(a[0], a[1], a[3], a[2], z_loss=1e-2, chunk=64)[0], (0, 1, 2)))
compiled = compiled.lower(*arguments).compile()
close(compiled(*arguments), expected)
assert "all-gather" not in compiled.as_text()

chunked._SHORT_BLOCK, chunked._MAX_BANDS, chunked._BLOCK_LOGITS = 8, 2, 2000
q, k, v, ids = normal(8, 37, 4, 2, 8), normal(8, 37, 2, 2, 8), normal(8, 37, 2, 16), jnp.arange(37)[None] // 10 + jnp.zeros((8, 1), jnp.int32)
loss = lambda name, *a: jnp.sum(jnp.sin(diff_attention(*a[:4], q_segment_ids=a[4], implementation=name)))
expected = jax.value_and_grad(lambda *a: loss("reference", *a, ids), (0, 1, 2, 3))(q, k, v, jnp.float32(0.4))
for name in ("chunked", "two_call"):
  # One λ that all devices share, as the model's is: its gradient must be the sum over all of them.
  mapped = shard(lambda *a: jax.lax.psum(loss(name, *a), "data"), (data, data, data, P(), data), P())
  close(jax.jit(jax.value_and_grad(mapped, (0, 1, 2, 3)))(q, k, v, jnp.float32(0.4), ids), expected)
print("done")
"""


def test_four_devices():
  environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")
  result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
  assert result.returncode == 0 and "done" in result.stdout, result.stderr[-3000:]
