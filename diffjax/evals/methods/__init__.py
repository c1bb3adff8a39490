"""Methods that suites share, so that they measure and read data in one way.

Data, the same for every model:

- `validation_rows`: rows of validation text, for suites of losses and layers.
- `needle_prompts`: prompts with hidden numbers, for needle and attention.
- `jsonl`: records from files of JSON lines, with the line in every error, for
  suites with questions.

What a model does:

- `inside`: attention and hidden states of each layer while the model runs, for
  attention, outliers, difference_map and the figures of a report.
- `scoring`: log-likelihoods of continuations, for harness.
- `lm_eval`: a model in the interface of lm-eval, for harness.
- `label_decoding`: the most likely of several labels, for many_shot.

Whether an answer is correct, for mathematics:

- `final_answer`: the answer in a solution, and the rules of its comparison.
- `equivalence`: math-verify in a process with limits. Its program is
  `verify_worker`.
"""
