"""What is trained: models, parallelisms, optimizers, batches, the training loop, and what of it is saved."""
