"""Methods that several measurements share: reading questions, looking inside a model, scoring, decoding and comparing answers."""
