"""DEX on Llama-3.2-1B: W_D and λ of every layer are trained, 66 K numbers; all else is frozen. docs/adaptation.md says what that may give.

Convert the weights first; the run starts from what lies in runs/llama_1b_dex, its tokenizer included:

    python -m diffjax.convert --from=llama:downloaded --to=diffjax:runs/llama_1b_dex --attention=dex
    python -m diffjax.train --config=configs/llama_1b_dex.py --workdir=runs/llama_1b_dex_tuned

For another Llama, add the flags that the conversion prints.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.model.update(
    attention="dex",
    head_norm=False,
    num_layers=16,
    embed_dim=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
  )
  config.model.update(
    vocab_size=128_256, ffn_dim=8192, max_length=131_072, rope_base=500_000.0
  )
  config.model.update(
    rope_scaling="llama3",
    rope_factor=32.0,
    rope_original_length=8192,
    remat="attention",
  )
  config.data.update(
    source="tfds:c4/en",
    tokenizer="runs/llama_1b_dex/tokenizer.json",
    length=4096,
  )
  config.optimizer.update(
    learning_rate=1e-3,
    schedule="cosine",
    warmup_steps=100,
    trained="dex_matrix,dex_lambda",
  )
  config.train.update(
    steps=3000, batch_size=64, init_from="runs/llama_1b_dex"
  )  # 0.26M tokens a step, 0.79B in all
  config.mesh.update(data=1, fsdp=-1)
  return config
