"""One optimizer update: the state, the gradients of a batch, the optimizers, adapters."""
