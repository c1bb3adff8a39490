"""Models in the layouts of other projects.

A layout is the files of a model: the names and shapes of its tensors, and the
fields of its config. The module of a layout reads a directory into a
`layout.Model`, writes one, or both. Its docstring describes the layout.
`diffjax.convert` is the command.

- diffllama: Hugging Face's DiffLlama, DIFF V1. Reads and writes.
- llama: Hugging Face's Llama, a Transformer. Reads.
- motif: Motif-2.6B and Motif-2-12.7B, DIFF V1. Reads and writes.
- phi_flash: attention layers of Phi-4-mini-flash-reasoning, DIFF V1. Reads and
  writes the tensors of single layers.
- unilm: the authors' layers, DIFF V1 and DIFF V2. Reads and writes.
- workdir: the workdirs of diffjax. Reads and writes.
"""
