"""Grouped differential attention from Llama-3.2-1B: DIFF V2 whose 32 heads share 8 noise maps, four to one. The attention layers are
trained; embeddings, norms and feed-forward layers are frozen. docs/adaptation.md says what that may give.

Convert the weights first; the run starts from what lies in runs/llama_1b_gda, its tokenizer included:

    python -m diffjax.convert --from=llama:downloaded --to=diffjax:runs/llama_1b_gda --attention=diff_v2 --num_noise_heads=8
    python -m diffjax.train --config=configs/llama_1b_gda.py --workdir=runs/llama_1b_gda_tuned

For another Llama, add the flags that the conversion prints.
"""

import ml_collections

from configs import llama_1b_dex


def get_config() -> ml_collections.ConfigDict:
  config = llama_1b_dex.get_config()
  config.model.update(attention="diff_v2", num_noise_heads=8)
  config.data.tokenizer = "runs/llama_1b_gda/tokenizer.json"
  config.optimizer.update(
    learning_rate=2e-5, trained="query,key,value,out,lambda_hat"
  )
  config.train.init_from = "runs/llama_1b_gda"
  return config
