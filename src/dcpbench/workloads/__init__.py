"""Models, parallelisms, optimizers, batches, the training loop, and the state of a run that is saved."""
