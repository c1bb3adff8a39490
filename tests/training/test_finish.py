"""The plot of a run's losses."""

from diffjax.training.finish import plot_losses


def test_plot_shows_both_losses(tmp_path):
  jsonl, png = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
  jsonl.write_text(
    '{"step": 1, "train/loss": 2.0}\n{"step": 2, "train/loss": null, "validation/loss": 1.9}\n{"step": 3, "train/loss": 1.0}\n'
  )
  plot_losses(jsonl, png)
  first = png.read_bytes()
  assert first[:8] == b"\x89PNG\r\n\x1a\n"
  jsonl.write_text('{"step": 1, "train/loss": 2.0}\n{"step": 3, "train/loss": 1.0}\n')
  plot_losses(jsonl, png)
  assert png.read_bytes() != first, "the validation loss is drawn"
