r"""Grouped differential attention from Llama-3.2-1B: DIFF V2, adapted.

Each of 8 noise maps is shared by four of the 32 heads. The attention layers
are trained; embeddings, norms and feed-forward layers are frozen.
docs/adaptation.md says what to expect.

Convert the weights first. The run starts from runs/llama_1b_gda and takes its
tokenizer:

    python -m diffjax.convert --from=llama:downloaded \
      --to=diffjax:runs/llama_1b_gda --attention=diff_v2 --num_noise_heads=8
    python -m diffjax.train --config=configs/llama_1b_gda.py \
      --workdir=runs/llama_1b_gda_tuned

For another Llama, add the flags that the conversion prints.
"""

import ml_collections

from diffjax.configs import base


def get_config() -> ml_collections.ConfigDict:
  """Returns the run's config."""
  config = base.get_config()
  config.model.update(
    attention="diff_v2",
    head_norm=False,
    num_layers=16,
    embed_dim=2048,
    num_heads=32,
    num_noise_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn_dim=8192,
    vocab_size=128_256,
    max_length=131_072,
    rope_base=500_000.0,
    rope_scaling="llama3",
    rope_factor=32.0,
    rope_original_length=8192,
    remat="attention",
  )
  config.data.update(
    source=base.fineweb_edu("sample/100BT/*.parquet"),
    tokenizer="runs/llama_1b_gda/tokenizer.json",
    length=4096,
    mode="auto",
    timeout=600.0,  # seconds: the Hub may pause a reader for 300
  )
  config.optimizer.update(
    learning_rate=2e-5,
    schedule="cosine",
    warmup_steps=100,
    trained="query,key,value,out,lambda_hat",
  )
  config.train.update(
    init_from="runs/llama_1b_gda",
    steps=3000,
    batch_size=64,  # 0.26 M tokens a step, 0.79 B in all
  )
  config.mesh.update(data=1, fsdp=-1)
  return config
