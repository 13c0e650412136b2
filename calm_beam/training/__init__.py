"""Training of models that can exit at every decoder layer, with the paper's layer-weighted loss."""
