"""What is trained: models, parallelisms, optimizers, batches, the training loop."""
