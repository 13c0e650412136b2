"""The sentences of the embedded task, from a lexicon and a grammar of our own; calm_beam/demo holds what they wrote."""
