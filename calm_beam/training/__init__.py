"""Training a model whose every decoder layer can predict, with the paper's layer-weighted loss."""
