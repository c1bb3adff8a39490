"""Methods of the suites: what several share, and parts that have one purpose.

Data, the same for every model:

- `validation_rows`: rows of validation text, for suites of losses and layers.
- `validation_documents`: whole documents of validation text, for position_nll
  and needle_prompts.
- `needle_prompts`: prompts with hidden numbers, for needle and attention.
- `labelled_texts`: texts with labels, and `demonstration_orders`: orders of
  them, for many_shot.
- `harness_tasks`: lm-eval's tasks with local files or the hub, for harness.
- `jsonl`: records from files of JSON lines, with the line in every error, for
  suites with questions.
- `token_limit`: the limit of tokens of a prompt and its answer, for many_shot
  and hallucination.

What a model does:

- `row_results`: the results of a function for each validation row, for
  validation, outliers and difference_map.
- `inside`: attention and hidden states of each layer while the model runs, for
  attention, outliers, difference_map and the figures of a report.
- `scoring`: log-likelihoods of continuations, for harness.
- `lm_eval`: a model in the interface of lm-eval, for harness.
- `label_decoding`: the most likely of several labels, for many_shot.

Whether an answer is correct:

- `text_overlap`: exact match and ROUGE-L, for hallucination.
- `judge`: prompts for a judge and its verdicts, for hallucination.
- `final_answer`: the answer in a solution, and the rules of its comparison, for
  mathematics.
- `equivalence`: math-verify in a process with limits. Its program is
  `verify_worker`.
"""
